"""Validation losses: smoothed along a run, the band of several runs, and their sensitivity to the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import fmean

import torch
from torch import Tensor

from .intervals import CONFIDENCE, Estimate, mean_interval

BANDWIDTH = 0.25  # Of the smoothing, in the natural logarithm of the step: at step 1000 it reaches from 779 to 1284.


@dataclass(frozen=True)
class Curve:
    """A run's validation losses; one that diverged ends early, or with a loss that is not finite."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    seconds_per_step: float = 1.0

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.losses):
            raise ValueError(f"a curve has one loss for each step, not {len(self.losses)} for {len(self.steps)}")
        if any(later <= earlier for earlier, later in pairwise((-1, *self.steps))):
            raise ValueError(f"the steps of a curve must grow from 0 on, and not be {self.steps}")
        if not 0 < self.seconds_per_step < math.inf:
            raise ValueError(f"the seconds per step of a curve must be above 0, not {self.seconds_per_step}")

    @property
    def evaluated(self) -> tuple[int, ...]:
        """The steps after the start at which the loss was finite."""
        return tuple(s for s, loss in zip(self.steps, self.losses, strict=True) if s > 0 and math.isfinite(loss))

    def ends_at(self, step: int) -> bool:
        """Whether the run came as far as this step, with a finite loss."""
        return bool(self.steps) and self.steps[-1] == step and math.isfinite(self.losses[-1])


def smooth(steps: Tensor, losses: Tensor) -> Tensor:
    """Losses smoothed along a curve; one that is not finite counts as the highest of its run. Shape: (K,), (..., K)."""
    finite = losses.isfinite()
    highest = losses.where(finite, -torch.inf).amax(-1, keepdim=True)
    return losses.where(finite, highest) @ smoothing(steps).T


def smoothing(steps: Tensor, bandwidth: float = BANDWIDTH) -> Tensor:
    """The matrix that fits a line in the logarithm of the step around each evaluation. Shape: (K,) → (K, K).

    A line, not a mean: all neighbours of the last step are earlier, and the mean of a falling curve is above its end.
    What the lines leave over is smoothed as well and added: a curve that bends then keeps its bend.

    >>> steps = torch.tensor([700.0, 800.0, 900.0, 1000.0]).double()
    >>> torch.allclose(smoothing(steps) @ -steps.log(), -steps.log())
    True
    """
    x = steps.double().log()
    away = x - x[:, None]
    weight = (1 - (away / bandwidth) ** 2).clamp(min=0)
    zeroth, first, second = ((weight * away**power).sum(1, keepdim=True) for power in range(3))
    spread = zeroth * second - first**2
    lonely = spread < 1e-12  # no neighbour within the bandwidth
    itself = torch.eye(len(x), dtype=torch.float64)
    line = torch.where(lonely, itself, weight * (second - first * away) / spread.where(~lonely, 1))
    return line + line @ (itself - line)


def log_steps_to(level: Tensor, steps: Tensor, losses: Tensor) -> Tensor:
    """Logarithm of the step at which a falling curve comes down to a level. Shape: (...), (K,), (..., K) → (...).

    That is the time spent above the level, with straight lines between the evaluations. For a curve that crosses once
    it is the crossing; for a noisy one neither the first crossing, which is early by luck, nor the last, which is late.

    >>> losses = torch.tensor([8.0, 4.0, 2.0, 1.0])
    >>> log_steps_to(torch.tensor(3.0), torch.tensor([1.0, 10.0, 100.0, 1000.0]), losses).exp()
    tensor(31.6228, dtype=torch.float64)
    """
    x = steps.double().log()
    above = losses - level[..., None]
    left, right = above[..., :-1], above[..., 1:]
    whole = left.abs() + right.abs()
    share = (left.clamp(min=0) + right.clamp(min=0)) / whole.where(whole > 0, 1)
    return x[0] + (share * x.diff()).sum(-1)


@dataclass(frozen=True)
class Band:
    """Mean over runs at each step and Student's interval of it; None where a run is missing or not finite."""

    steps: tuple[int, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


def confidence_band(curves: Sequence[Curve], confidence: float = CONFIDENCE) -> Band:
    """The band of runs at every step that one of them was evaluated at; without low and high for a single run.

    Where a run has ended or diverged there is no mean: that of the others would look better than the method is.

    >>> confidence_band([Curve((1, 2), (2.0, 1.0)), Curve((1, 2), (4.0, math.inf))])
    Band(steps=(1, 2), mean=(3.0, None), low=(-9.7..., None), high=(15.7..., None))
    """
    steps = tuple(sorted({step for curve in curves for step in curve.steps}))
    tables = [dict(zip(curve.steps, curve.losses, strict=True)) for curve in curves]
    found = [mean_interval([table.get(step, math.nan) for table in tables], confidence) for step in steps]
    mean, low, high = (tuple(getattr(one, name) for one in found) for name in ("value", "low", "high"))
    return Band(steps, mean, low, high)


def rate_sensitivity(
    rates: Sequence[float], losses: Sequence[Sequence[float]], initial_loss: float, confidence: float = CONFIDENCE
) -> Estimate:
    """The loss that one gives away, on average over the rates, by not knowing the best; the interval is over seeds.

    It is the mean over rates of min(loss, loss at initialisation), minus the best of them.
    `losses` holds, for each rate, one loss for each seed; a run that diverged counts as the loss at initialisation.

    >>> rate_sensitivity([1e-3, 2e-3, 4e-3], [[0.5], [0.25], [math.inf]], initial_loss=1.0)
    Estimate(value=0.33..., low=None, high=None)
    """
    check_table(rates, losses)
    # A loss that is not a number compares as false, and so counts as that at initialisation.
    capped = ([loss if loss < initial_loss else initial_loss for loss in of_rate] for of_rate in losses)
    sweeps = zip(*capped, strict=True)
    found = mean_interval([fmean(sweep) - min(sweep) for sweep in sweeps], confidence)
    return Estimate(found.value, None if found.low is None else max(0.0, found.low), found.high)


def largest_stable_rate(
    rates: Sequence[float], losses: Sequence[Sequence[float]], initial_loss: float, tolerance: float = 0.1
) -> float | None:
    """The last rate, going up from the best one, before a run diverges or the loss is no longer near the best.

    Near is within a tolerance of what training gains: mean loss ≤ best + tolerance · (loss at initialisation − best).
    None if a run diverged at every rate, or none came below the loss at initialisation.

    >>> largest_stable_rate([1e-3, 2e-3, 4e-3], [[0.5], [0.25], [math.inf]], initial_loss=1.0)
    0.002
    """
    check_table(rates, losses)
    # A mean with an infinite loss is infinite; one with a loss that is not a number is no number.
    means = {rate: fmean(of_rate) for rate, of_rate in zip(rates, losses, strict=True)}
    means = {rate: mean for rate, mean in means.items() if mean < math.inf}
    if not means or min(means.values()) >= initial_loss:
        return None
    best = min(means, key=lambda rate: means[rate])
    limit = means[best] + tolerance * (initial_loss - means[best])
    upwards = sorted(rate for rate in rates if rate >= best)
    return list(takewhile(lambda rate: means.get(rate, math.inf) <= limit, upwards))[-1]


def check_table(rates: Sequence[float], losses: Sequence[Sequence[float]]) -> None:
    seeds = {len(of_rate) for of_rate in losses}
    if len(rates) != len(losses) or len(seeds) != 1 or 0 in seeds or len(set(rates)) != len(rates):
        counts = [len(of_rate) for of_rate in losses]
        raise ValueError(f"each rate needs a loss for every seed: there are {len(rates)} rates and {counts} losses")
