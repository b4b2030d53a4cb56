"""The exact mean and variance of what a sampler gives for Gaussian data, without sampling at random."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from exact_scores import MEAN, gaussian_predictor
from torch import Tensor

from scalelong.diffusion import DiffusionProcess, sample
from scalelong.diffusion.samplers import Route, Spacing, build_solver
from scalelong.diffusion.singlestep import Singlestep

# Those that draw noise, and their weak orders.
WEAK_ORDERS = {"ddpm": 1, "euler-maruyama": 1, "dpm-solver++-sde": 2}


class UnitNoise:
    """Stands for torch.randn: the image of seed k draws 1 the k-th time it draws, and 0 otherwise; seed 0 only 0."""

    def __init__(self) -> None:
        self.draws: dict[int, int] = {}

    def __call__(self, *shape: Any, generator: torch.Generator, **options: Any) -> Tensor:
        seed = generator.initial_seed()
        self.draws[seed] = self.draws.get(seed, 0) + 1
        shape = shape if isinstance(shape[0], int) else tuple(shape[0])
        return torch.full(shape, float(self.draws[seed] == seed))


def moments(process: DiffusionProcess, sampler: str, steps: int, std: float, **options: Any) -> tuple[float, float]:
    """The exact mean and variance of what a sampler gives for data N(MEAN, std²): it is linear in all its noise."""
    unit, draws = UnitNoise(), steps if sampler in WEAK_ORDERS else 1
    given = {"seeds": range(draws + 1), "steps": steps, "sampler": sampler, "clip": False, **options}
    with mock.patch.object(torch, "randn", unit):
        images = sample(gaussian_predictor(process, std), process, (1, 1, 1), **given)
    # The last step ends at an estimate of x_0; where it draws noise all the same, it must be multiplied by 0.
    assert set(unit.draws.values()) <= {draws, draws + (sampler in WEAK_ORDERS)}
    mean, *others = images.flatten().double().tolist()
    return mean, sum((other - mean) ** 2 for other in others)


def bias(process: DiffusionProcess, sampler: str, steps: int, std: float, **options: Any) -> float:
    """How far the variance is from that of the data, as a share of it."""
    return moments(process, sampler, steps, std, **options)[1] / std**2 - 1


def flow_to_data(
    process: DiffusionProcess, sampler: str, steps: int, noise: Tensor, std: float, spacing: Spacing = "quadratic"
) -> Tensor:
    """Where the probability flow of N(MEAN, std²) takes the noise on a sampler's way.

    The flow keeps the number of deviations from the mean. Solvers end at the mean of x_0 at their cleanest time, those
    in single steps at the state itself.
    """
    solver = build_solver(process, sampler, Route(steps, spacing, "small"))
    if isinstance(solver, Singlestep):
        start, end = (solver.alpha[place] ** 2 for place in (0, -1))
        share = 1.0
    else:
        places = [process.schedule.times.tolist().index(solver.times[place].item()) for place in (0, -1)]
        start, end = process.schedule.log_alphas_cumprod[places].exp().tolist()
        share = end**0.5 * std**2 / (end * std**2 + 1 - end)
    deviations = (noise - start**0.5 * MEAN) / (start * std**2 + 1 - start) ** 0.5
    mean = MEAN * (end**0.5 if isinstance(solver, Singlestep) else 1)
    return (mean + share * (end * std**2 + 1 - end) ** 0.5 * deviations).float()
