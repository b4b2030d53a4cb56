"""The samplers that draw noise: their distribution converges at its weak order, and the noise is the image's own.

For Gaussian data a sampler is a linear map of the numbers it draws, so that the mean and variance of its results follow
from one image without noise and one for each number that is 1 among zeros: no Monte-Carlo error hides the order.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from exact_scores import MEAN, build, gaussian_predictor, seeded_noise

from scalelong.diffusion import DiffusionProcess, sample
from scalelong.diffusion.solvers import EulerFlow, EulerMaruyama, sample_noise, score, solver_indices

WEAK_ORDERS = {"ddpm": 1, "euler-maruyama": 1, "dpm-solver++-sde": 2}
STEPS = (20, 40, 80, 160)

random_samplers = pytest.mark.parametrize("sampler", WEAK_ORDERS)


class UnitNoise:
    """Stands for torch.randn: the image of seed k draws 1 the k-th time it draws, and 0 otherwise; seed 0 only 0."""

    def __init__(self) -> None:
        self.draws: dict[int, int] = {}

    def __call__(self, *shape: Any, generator: torch.Generator, **options: Any) -> torch.Tensor:
        seed = generator.initial_seed()
        self.draws[seed] = self.draws.get(seed, 0) + 1
        shape = shape if isinstance(shape[0], int) else tuple(shape[0])
        return torch.full(shape, float(self.draws[seed] == seed))


def moments(
    process: DiffusionProcess, sampler: str, steps: int, std: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """The exact mean and variance of what a sampler gives for data N(MEAN, std²)."""
    unit = UnitNoise()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", unit)
        seeds = range(steps + 1)
        images = sample(
            gaussian_predictor(process, std), process, (1, 1, 1), seeds=seeds, steps=steps, sampler=sampler, clip=False
        )
    # The last step ends at an estimate of x_0; where it draws noise all the same, it must be multiplied by 0.
    assert set(unit.draws.values()) <= {steps, steps + 1}
    mean, *others = images.flatten().double().tolist()
    return mean, sum((other - mean) ** 2 for other in others)


@random_samplers
@pytest.mark.parametrize("kind", [("linear", "discrete"), ("cosine", "continuous")], ids="-".join)
def test_twice_the_steps_divide_the_error_of_the_variance_by_two_to_the_weak_order(
    kind, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, std, order = build(kind), 0.5, WEAK_ORDERS[sampler]
    signal = process.schedule.alphas_cumprod[0].item()
    exact = std**2 * signal * std**2 / (signal * std**2 + 1 - signal)  # of the mean of x_0 at the cleanest time
    found = [moments(process, sampler, steps, std, monkeypatch) for steps in STEPS]
    errors = [abs(variance - exact) / exact for _, variance in found]
    # Ancestral sampling approaches its order from below: 1.80, 1.89, 1.97 in discrete time.
    assert all(coarse / fine > 0.88 * 2**order for coarse, fine in itertools.pairwise(errors)), errors
    assert all(mean == pytest.approx(MEAN, abs=0.11 / steps) for (mean, _), steps in zip(found, STEPS, strict=True))


def test_four_hundred_steps_of_euler_maruyama_miss_less_than_one_percent_of_the_deviation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mean, variance = moments(build(("linear", "continuous")), "euler-maruyama", 400, 0.2, monkeypatch)
    assert mean == pytest.approx(MEAN, abs=1e-3)
    assert math.sqrt(variance) == pytest.approx(0.2, rel=0.01)


@random_samplers
def test_noise_of_every_step_comes_from_the_generator_of_the_image(sampler: str) -> None:
    process = build()
    images = sample(gaussian_predictor(process), process, (1, 4, 4), seeds=[5, 5, 6], steps=5, sampler=sampler)
    assert torch.equal(images[0], images[1])
    noise = seeded_noise(range(5, 6), 1, 4, 4).expand(3, -1, -1, -1)
    same_start = sample(gaussian_predictor(process), process, noise, seeds=[5, 5, 6], steps=5, sampler=sampler)
    assert torch.equal(same_start[0], images[0])
    assert not torch.equal(same_start[2], same_start[0])


@pytest.mark.parametrize("kind", [("linear", "continuous"), ("cosine", "continuous")], ids="-".join)
def test_in_continuous_time_a_step_is_the_integral_of_the_rate(kind) -> None:
    process = build(kind)
    solver = EulerMaruyama(process, solver_indices(process, 1000))
    assert solver.indices == list(range(999, -1, -1))
    integral = process.schedule.closed_form(process.schedule.times).neg().tolist()
    for tau, expected in zip(solver.tau, [*integral[::-1], 0.0], strict=True):
        assert tau == pytest.approx(expected, rel=1e-9)


def test_the_score_is_the_gradient_of_the_log_density() -> None:
    tau, x0 = 0.7, torch.tensor([[0.4]], dtype=torch.float64)
    x = torch.tensor([[0.9]], dtype=torch.float64, requires_grad=True)
    density = torch.distributions.Normal(math.exp(-tau / 2) * x0, math.sqrt(1 - math.exp(-tau)))
    density.log_prob(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(score(x0, x.detach(), tau), x.grad, rtol=1e-12, atol=0)


def test_without_its_noise_and_half_the_score_the_sde_is_the_flow() -> None:
    process, generators = build(), [torch.Generator().manual_seed(0)]
    indices, x, x0 = [500, 400, 0], torch.randn(1, 1, 2, 2), torch.randn(1, 1, 2, 2)
    sde, flow = EulerMaruyama(process, indices), EulerFlow(process, indices)
    length = sde.tau[0] - sde.tau[1]
    noise = sample_noise((1, 2, 2), [torch.Generator().manual_seed(0)])
    drift = sde.step(x0, x, generators) - math.sqrt(length) * noise - x
    half_score = score(x0, x, sde.tau[0]) * length / 2
    torch.testing.assert_close(flow.step(x0, x, generators) - x, drift - half_score)
