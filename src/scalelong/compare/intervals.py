"""What a few runs say: intervals of means, differences and shares, bands of curves, sensitivity to the rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, takewhile

import torch
from scipy import special
from torch import Tensor

CONFIDENCE = 0.95  # Of the intervals of a comparison.
RESAMPLES = 2000  # Of the bootstrap; each is used twice: as it is, and mirrored.
BLOCK = 64  # Rows that are resampled at a time, to bound the memory.
NEAR = 0.1  # Of what training gains: how far a rate's loss may be above the best.


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; None where the numbers do not allow one."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Difference(Estimate):
    """The mean of first − second over pairs, its interval, and the p of the paired t test, which agrees with it."""

    p: float | None = None


def mean_interval(values: Sequence[float]) -> Estimate:
    """The mean with Student's interval; no interval for one value, and nothing if one of them is not finite.

    >>> mean_interval([1.0, 2.0, 3.0])
    Estimate(value=2.0, low=-0.48..., high=4.48...)
    """
    if not values or not all(map(math.isfinite, values)):
        return Estimate(None)
    mean = statistics.mean(values)  # exact, so that equal values are their own mean
    if len(values) == 1:
        return Estimate(mean)
    half = student_quantile(CONFIDENCE, len(values) - 1) * standard_error(values)
    return Estimate(mean, mean - half, mean + half)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """How much the first are above the second, pair by pair.

    >>> paired_difference([1.0, 2.0, 3.0], [0.5, 1.0, 2.5])
    Difference(value=0.66..., low=-0.05..., high=1.38..., p=0.057...)
    """
    if len(first) != len(second):
        raise ValueError(f"pairs need as many first values as second ones, not {len(first)} and {len(second)}")
    differences = [one - other for one, other in zip(first, second, strict=True)]
    found = mean_interval(differences)
    if found.value is None or found.low is None:
        return Difference(found.value)
    error, p = standard_error(differences), float(found.value == 0)
    if error > 0:
        p = 2 * float(special.stdtr(len(differences) - 1, -abs(found.value) / error))
    return Difference(found.value, found.low, found.high, p)


def student_quantile(confidence: float, freedom: int) -> float:
    """The t within which |T| lies with that chance.

    >>> student_quantile(0.95, 4)
    2.776...
    """
    return float(special.stdtrit(freedom, (1 + confidence) / 2))


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def proportion_interval(count: int, of: int) -> tuple[float, float]:
    """Wilson's interval of a share; it stays within 0 and 1, and says something of 0 of 5 as well.

    >>> proportion_interval(0, 5)
    (0.0, 0.43...)
    """
    from scipy.stats import binomtest  # Takes most of a second to import.

    if not 0 <= count <= of:
        raise ValueError(f"a share is a count between 0 and the total, not {count} of {of}")
    if of == 0:
        return 0.0, 1.0
    found = binomtest(count, of).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def bootstrap_interval(values: Tensor, confidence: float = CONFIDENCE) -> tuple[Tensor, Tensor]:
    """Low and high end for the mean, by a smoothed bootstrap of Student's t. Shape: (..., n) → (...), (...); n ≥ 2.

    It covers as often as it says even with three values, where the percentile interval covers 75 % instead of 95 %.
    What is resampled is the error of a mean in standard errors of its own resample, so that not knowing the spread
    counts too; and each resampled value gets Gaussian noise, or else three values would often be thrice the same.
    The resamples are always the same, the order of values does not matter, and that of −x is the mirrored one.

    >>> [round(end.item(), 1) for end in bootstrap_interval(torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]))]
    [0.6, 8.6]
    """
    count, x = values.shape[-1], values.double().sort(dim=-1).values
    mean, spread = x.mean(-1), x.std(-1)
    standard = (x - mean[..., None]) / spread.where(spread > 0, 1)[..., None]
    tails = torch.cat([t_tails(rows, confidence) for rows in standard.reshape(-1, count).split(BLOCK)])
    low, high = (mean[..., None] - tails.view(*mean.shape, 2) * (spread / math.sqrt(count))[..., None]).unbind(-1)
    return low, high


def t_tails(rows: Tensor, confidence: float) -> Tensor:
    """The upper and the lower end of the resampled values of t. Shape: (R, n), sorted → (R, 2)."""
    index, noise = resamples(rows.shape[-1])
    resampled = rows[:, index] + noise
    t = resampled.mean(-1) / resampled.std(-1) * math.sqrt(rows.shape[-1])
    outside = max(1, round((1 - confidence) / 2 * t.shape[-1]))
    return torch.stack([t.kthvalue(t.shape[-1] + 1 - outside).values, t.kthvalue(outside).values], dim=-1)


@lru_cache(maxsize=16)
def resamples(count: int) -> tuple[Tensor, Tensor]:
    """Which of the sorted values are taken, and the noise that each gets. Shape: (2 · RESAMPLES, n) both.

    The second half mirrors the first: what is true of x is then true of −x exactly.
    """
    generator = torch.Generator().manual_seed(count)
    index = torch.randint(count, (RESAMPLES, count), generator=generator)
    noise = torch.randn(RESAMPLES, count, generator=generator, dtype=torch.float64)
    width = 1.06 * count**-0.2  # of a kernel estimate of a normal density (Silverman's rule), in standard deviations
    return torch.cat([index, count - 1 - index]), width * torch.cat([noise, -noise])


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


@dataclass(frozen=True)
class Band:
    """Mean over runs at each step and Student's interval of it; None where a run is missing or not finite."""

    steps: tuple[int, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


def confidence_band(curves: Sequence[Curve]) -> Band:
    """The band of runs at every step that one of them was evaluated at; without low and high for a single run.

    Where a run has ended or diverged there is no mean: that of the others would look better than the method is.

    >>> confidence_band([Curve((1, 2), (2.0, 1.0)), Curve((1, 2), (4.0, math.inf))])
    Band(steps=(1, 2), mean=(3.0, None), low=(-9.7..., None), high=(15.7..., None))
    """
    steps = tuple(sorted({step for curve in curves for step in curve.steps}))
    tables = [dict(zip(curve.steps, curve.losses, strict=True)) for curve in curves]
    found = [mean_interval([table.get(step, math.nan) for table in tables]) for step in steps]
    mean, low, high = (tuple(getattr(one, name) for one in found) for name in ("value", "low", "high"))
    return Band(steps, mean, low, high)


def rate_sensitivity(rates: Sequence[float], losses: Sequence[Sequence[float]], initial_loss: float) -> Estimate:
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
    found = mean_interval([statistics.fmean(sweep) - min(sweep) for sweep in sweeps])
    return Estimate(found.value, None if found.low is None else max(0.0, found.low), found.high)


def largest_stable_rate(rates: Sequence[float], losses: Sequence[Sequence[float]], initial_loss: float) -> float | None:
    """The last rate, going up from the best one, before a run diverges or the loss is no longer near the best.

    Near is within a tenth of what training gains: mean loss ≤ best + NEAR · (loss at initialisation − best).
    None if a run diverged at every rate, or none came below the loss at initialisation.

    >>> largest_stable_rate([1e-3, 2e-3, 4e-3], [[0.5], [0.25], [math.inf]], initial_loss=1.0)
    0.002
    """
    check_table(rates, losses)
    # A mean with an infinite loss is infinite; one with a loss that is not a number is no number.
    means = {rate: statistics.fmean(of_rate) for rate, of_rate in zip(rates, losses, strict=True)}
    means = {rate: mean for rate, mean in means.items() if mean < math.inf}
    if not means or min(means.values()) >= initial_loss:
        return None
    best = min(means, key=lambda rate: means[rate])
    limit = means[best] + NEAR * (initial_loss - means[best])
    upwards = sorted(rate for rate in rates if rate >= best)
    return list(takewhile(lambda rate: means.get(rate, math.inf) <= limit, upwards))[-1]


def check_table(rates: Sequence[float], losses: Sequence[Sequence[float]]) -> None:
    seeds = {len(of_rate) for of_rate in losses}
    if len(rates) != len(losses) or len(seeds) != 1 or 0 in seeds or len(set(rates)) != len(rates):
        counts = [len(of_rate) for of_rate in losses]
        raise ValueError(f"each rate needs a loss for every seed: there are {len(rates)} rates and {counts} losses")
