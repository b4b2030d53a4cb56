"""Intervals for a few numbers: means and differences over seeds, shares of runs, and a bootstrap for skewed values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from scipy import special
from torch import Tensor

CONFIDENCE = 0.95  # Of the intervals of a comparison.
RESAMPLES = 2000  # Of the bootstrap; each is used twice: as it is, and mirrored.
BLOCK = 64  # Rows that are resampled at a time, to bound the memory.


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


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean with Student's interval; no interval for one value, and nothing if one of them is not finite.

    >>> mean_interval([1.0, 2.0, 3.0])
    Estimate(value=2.0, low=-0.48..., high=4.48...)
    """
    if not values or not all(map(math.isfinite, values)):
        return Estimate(None)
    mean = statistics.mean(values)  # exact, so that equal values are their own mean
    if len(values) == 1:
        return Estimate(mean)
    half = student_quantile(confidence, len(values) - 1) * standard_error(values)
    return Estimate(mean, mean - half, mean + half)


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Difference:
    """How much the first are above the second, pair by pair.

    >>> paired_difference([1.0, 2.0, 3.0], [0.5, 1.0, 2.5])
    Difference(value=0.66..., low=-0.05..., high=1.38..., p=0.057...)
    """
    if len(first) != len(second):
        raise ValueError(f"pairs need as many first values as second ones, not {len(first)} and {len(second)}")
    differences = [one - other for one, other in zip(first, second, strict=True)]
    found = mean_interval(differences, confidence)
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


def proportion_interval(count: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval of a share; it stays within 0 and 1, and says something of 0 of 5 as well.

    >>> proportion_interval(0, 5)
    (0.0, 0.43...)
    """
    from scipy.stats import binomtest  # Takes most of a second to import.

    if not 0 <= count <= of:
        raise ValueError(f"a share is a count between 0 and the total, not {count} of {of}")
    if of == 0:
        return 0.0, 1.0
    found = binomtest(count, of).proportion_ci(confidence, method="wilson")
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
    ordered = t.sort(dim=-1).values
    return torch.stack([ordered[:, -outside], ordered[:, outside - 1]], dim=-1)


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
