"""Runs whose true speed-up is known: power laws with seeds that differ, and evaluations that are noisy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.compare.intervals import bootstrap_interval
from scalelong.compare.speedup import log_speedup

STEPS = 3200


@dataclass(frozen=True)
class Setting:
    """The loss of a run is a + (1 + speed · step / 50)^−power, times one plus noise."""

    speedup: float = 1.0
    seeds: int = 5
    spread: float = 0.1
    """Standard deviation of the logarithm of each run's own speed, besides what the runs of a seed share."""
    noise: float = 0.01
    """Of one evaluation, relative to the loss."""
    correlation: float = 0.0
    """Of the noise of one evaluation with that of the next."""
    evaluations: int = 32
    power: float = 0.5


QUIET = {"spread": 0.05, "noise": 0.003}
NOISY = {"spread": 0.1, "noise": 0.03}
WAVY = {"spread": 0.2, "noise": 0.03, "correlation": 0.8}
RARE = {"spread": 0.0, "noise": 0.03, "evaluations": 12, "power": 1.0}
NOISES = {"quiet": QUIET, "noisy": NOISY, "wavy": WAVY, "rarely evaluated": RARE}


@dataclass(frozen=True)
class Rates:
    """How often, over the repetitions, the interval covers the truth and what the verdict is."""

    covered: float
    faster: float
    slower: float
    width: float
    """Median of high / low."""


def draw_runs(setting: Setting, repetitions: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Steps, and the losses of the baseline and of the method. Shape: (K,), (R, n, K), (R, n, K)."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(repetitions, setting.seeds, *shape, generator=generator, dtype=torch.float64)

    steps = torch.arange(1, setting.evaluations + 1).double() * STEPS / setting.evaluations
    shared_speed, floor = torch.exp(0.3 * normal(1)), 0.1 + 0.01 * normal(1)

    def losses(speed: float) -> Tensor:
        own = speed * shared_speed * torch.exp(setting.spread * normal(1))
        clean = floor + (1 + own * steps / 50) ** -setting.power
        return clean * (1 + setting.noise * correlate(normal(setting.evaluations), setting.correlation))

    return steps, losses(1.0), losses(setting.speedup)


def correlate(noise: Tensor, correlation: float) -> Tensor:
    """Standard normal noise in which neighbours are correlated, from independent noise. Shape: (..., K)."""
    columns = [noise[..., 0]]
    for fresh in noise.unbind(-1)[1:]:
        columns.append(correlation * columns[-1] + math.sqrt(1 - correlation**2) * fresh)
    return torch.stack(columns, -1)


def measure_rates(setting: Setting, repetitions: int = 1000, seed: int = 0) -> Rates:
    """Repeat a comparison of so many seeds, and count."""
    steps, baseline, method = draw_runs(setting, repetitions, torch.Generator().manual_seed(seed))
    low, high = bootstrap_interval(log_speedup(steps, baseline, steps, method))
    truth = math.log(setting.speedup)
    events = (low <= truth) & (truth <= high), low > 0, high < 0
    return Rates(*(event.double().mean().item() for event in events), (high - low).median().exp().item())
