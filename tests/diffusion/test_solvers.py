"""Every solver on data whose exact score is known: the right moments, and an error that shrinks at its order.

For Gaussian data a solver is a linear map of the numbers it samples, so that the mean and variance of its results
follow from one image without noise and one for each number that is 1 among zeros: no Monte-Carlo error hides the weak
order.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache, partial

import pytest
import torch
from exact_moments import WEAK_ORDERS, flow_to_data, moments
from exact_scores import GAUSSIAN, MEAN, THREE, build, gaussian_predictor, seeded_noise
from torch import Tensor

from scalelong.diffusion import SAMPLERS, sample
from scalelong.diffusion.samplers import solver_indices
from scalelong.diffusion.solvers import EulerFlow, EulerMaruyama, sample_noise, score

# As many steps as make the error of the discretisation small beside that of the Monte-Carlo estimate.
STEPS = {
    "ddim": 200,
    "ddpm": 400,
    "dpm-solver++": 60,
    "dpm-solver++-sde": 150,
    "heun": 40,
    "unipc": 40,
    "dpm-solver-3": 60,
    "dpm-solver++-3": 60,
    "euler-maruyama": 400,
    "ode": 300,
    "ode-heun": 80,
}
ORDERS = {"ddim": 1, "ode": 1, "dpm-solver++": 2, "heun": 2, "ode-heun": 2, "unipc": 2}

DATA = {"gaussian": GAUSSIAN, "mixture": THREE}

samplers = pytest.mark.parametrize("sampler", SAMPLERS)


@lru_cache
def sample_pixels(name: str, sampler: str) -> Tensor:
    """Independent samples. Shape: (9216, 2)."""
    data = DATA[name]
    process = build(("linear", "continuous"), "x0")
    images = sample(
        data.predictor(process),
        process,
        (2, 24, 24),
        seeds=range(16),
        steps=STEPS[sampler],
        sampler=sampler,
        clip=False,
    )
    return images.movedim(1, -1).reshape(-1, 2).double()


@samplers
@pytest.mark.parametrize("name", DATA)
def test_the_exact_score_gives_the_mean_and_covariance_of_the_data(name: str, sampler: str) -> None:
    data, sampled = DATA[name], sample_pixels(name, sampler)
    centred = sampled - data.mean
    products = centred[:, :, None] * centred[:, None, :]
    # Four standard errors of each estimate.
    mean_error, covariance_error = (4 * values.std(0) / len(sampled) ** 0.5 for values in (sampled, products))
    assert ((sampled.mean(0) - data.mean).abs() < mean_error).all()
    assert ((products.mean(0) - data.covariance).abs() < covariance_error).all()


@samplers
def test_the_exact_score_of_a_mixture_gives_every_part_its_weight(sampler: str) -> None:
    sampled = sample_pixels("mixture", sampler)
    nearest = torch.cdist(sampled, THREE.means).argmin(1)
    shares = torch.bincount(nearest, minlength=3) / len(sampled)
    # Four standard errors of a count; the parts lie eight deviations apart.
    assert ((shares - THREE.weights).abs() < 4 * (THREE.weights * (1 - THREE.weights) / len(sampled)).sqrt()).all()


@pytest.mark.parametrize("time", ["discrete", "continuous"])
@pytest.mark.parametrize(("sampler", "order"), ORDERS.items())
def test_twice_the_steps_divide_the_error_by_two_to_the_solver_s_order(sampler: str, order: int, time: str) -> None:
    process, noise, std = build(("linear", time)), seeded_noise(range(4), 1, 8, 8), 0.5
    generate = partial(
        sample, gaussian_predictor(process, std), process, noise, seeds=range(4), sampler=sampler, clip=False
    )
    exact = flow_to_data(process, sampler, 10, noise, std)
    errors = [(generate(steps=steps) - exact).abs().mean().item() for steps in (10, 20, 40, 80)]
    assert all(coarse / fine > 0.95 * 2**order for coarse, fine in itertools.pairwise(errors)), errors
    if order == 1:
        assert errors[-2] / errors[-1] < 2.1


def test_at_fifty_steps_a_second_order_solver_is_ten_times_as_exact_as_a_first_order_one() -> None:
    process, noise = build(("linear", "continuous")), seeded_noise(range(4), 1, 8, 8)
    generate = partial(sample, gaussian_predictor(process, 0.5), process, noise, seeds=range(4), steps=50, clip=False)
    exact = flow_to_data(process, "ddim", 50, noise, 0.5)
    errors = {sampler: (generate(sampler=sampler) - exact).abs().mean().item() for sampler in ORDERS}
    first = min(error for sampler, error in errors.items() if ORDERS[sampler] == 1)
    assert all(errors[sampler] < first / 10 for sampler, order in ORDERS.items() if order == 2), errors


# Solvers with noise


FINER = (20, 40, 80, 160)

random_samplers = pytest.mark.parametrize("sampler", WEAK_ORDERS)


@random_samplers
@pytest.mark.parametrize("kind", [("linear", "discrete"), ("cosine", "continuous")], ids="-".join)
def test_twice_the_steps_divide_the_error_of_the_variance_by_two_to_the_weak_order(kind, sampler: str) -> None:
    process, std, order = build(kind), 0.5, WEAK_ORDERS[sampler]
    signal = process.schedule.alphas_cumprod[0].item()
    exact = std**2 * signal * std**2 / (signal * std**2 + 1 - signal)  # of the mean of x_0 at the cleanest time
    found = [moments(process, sampler, steps, std) for steps in FINER]
    errors = [abs(variance - exact) / exact for _, variance in found]
    # Ancestral sampling approaches its order from below: 1.80, 1.89, 1.97 in discrete time.
    assert all(coarse / fine > 0.88 * 2**order for coarse, fine in itertools.pairwise(errors)), errors
    assert all(mean == pytest.approx(MEAN, abs=0.11 / steps) for (mean, _), steps in zip(found, FINER, strict=True))


def test_four_hundred_steps_of_euler_maruyama_miss_less_than_one_percent_of_the_deviation() -> None:
    mean, variance = moments(build(("linear", "continuous")), "euler-maruyama", 400, 0.2)
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
    assert torch.equal(solver.times, process.schedule.times.flip(0))
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
