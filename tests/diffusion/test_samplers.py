"""Every sampler on data whose exact score is known: the right moments, and an error that shrinks at its order."""

from __future__ import annotations

import itertools
from functools import lru_cache, partial

import pytest
import torch
from exact_scores import GAUSSIAN, MEAN, THREE, build, gaussian_predictor, seeded_noise
from torch import Tensor

from scalelong.diffusion import SAMPLERS, DiffusionProcess, sample
from scalelong.diffusion.samplers import solver_indices

# As many steps as make the error of the discretisation small beside that of the Monte-Carlo estimate.
STEPS = {
    "ddim": 200,
    "ddpm": 400,
    "dpm-solver++": 60,
    "dpm-solver++-sde": 150,
    "heun": 40,
    "unipc": 40,
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


def flow_to_data(process: DiffusionProcess, noise: Tensor, std: float) -> Tensor:
    """Where the probability flow of N(MEAN, std²) takes the noise, with the mean of x_0 at the cleanest time.

    The flow keeps the number of deviations from the mean.
    """
    signals = process.schedule.alphas_cumprod[[solver_indices(process, 10)[0], 0]].double()
    first, last = (signals * std**2 + 1 - signals).sqrt()
    deviations = (noise - signals[0].sqrt() * MEAN) / first
    return (MEAN + signals[1].sqrt() * std**2 / last * deviations).float()


@pytest.mark.parametrize("time", ["discrete", "continuous"])
@pytest.mark.parametrize(("sampler", "order"), ORDERS.items())
def test_twice_the_steps_divide_the_error_by_two_to_the_solver_s_order(sampler: str, order: int, time: str) -> None:
    process, noise, std = build(("linear", time)), seeded_noise(range(4), 1, 8, 8), 0.5
    generate = partial(
        sample, gaussian_predictor(process, std), process, noise, seeds=range(4), sampler=sampler, clip=False
    )
    exact = flow_to_data(process, noise, std)
    errors = [(generate(steps=steps) - exact).abs().mean().item() for steps in (10, 20, 40, 80)]
    assert all(coarse / fine > 0.95 * 2**order for coarse, fine in itertools.pairwise(errors)), errors
    if order == 1:
        assert errors[-2] / errors[-1] < 2.1


def test_at_fifty_steps_a_second_order_solver_is_ten_times_as_exact_as_a_first_order_one() -> None:
    process, noise = build(("linear", "continuous")), seeded_noise(range(4), 1, 8, 8)
    generate = partial(sample, gaussian_predictor(process, 0.5), process, noise, seeds=range(4), steps=50, clip=False)
    exact = flow_to_data(process, noise, 0.5)
    errors = {sampler: (generate(sampler=sampler) - exact).abs().mean().item() for sampler in ORDERS}
    first = min(error for sampler, error in errors.items() if ORDERS[sampler] == 1)
    assert all(errors[sampler] < first / 10 for sampler, order in ORDERS.items() if order == 2), errors
