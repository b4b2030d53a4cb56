"""Intervals for a few numbers: means and differences over seeds, and shares of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.95
"""Of the intervals of a comparison."""


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


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
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


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> Difference:
    """How much the first are above the second, pair by pair.

    >>> paired_difference([1.0, 2.0, 3.0], [0.5, 1.0, 2.5])
    Difference(value=0.66..., low=-0.05..., high=1.38..., p=0.057...)
    """
    if len(first) != len(second):
        raise ValueError(f"pairs need as many first values as second ones, not {len(first)} and {len(second)}")
    differences = [one - other for one, other in zip(first, second, strict=True)]
    found = mean_interval(differences, confidence)
    p = None if found.low is None else student_p(differences)
    return Difference(found.value, found.low, found.high, p)


def student_p(values: Sequence[float]) -> float:
    """Two-sided p of Student's test that the true mean is 0."""
    mean, error = abs(statistics.mean(values)), standard_error(values)
    if error == 0:
        return 0.0 if mean else 1.0
    return max(0.0, 1 - student_within(mean / error, len(values) - 1))


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def proportion_interval(count: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share; it stays within 0 and 1, and says something of 0 of 5 as well.

    >>> proportion_interval(0, 5)
    (0.0, 0.43...)
    """
    if not 0 <= count <= of:
        raise ValueError(f"a share is a count between 0 and the total, not {count} of {of}")
    if of == 0:
        return 0.0, 1.0
    z2 = statistics.NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    centre = (count + z2 / 2) / (of + z2)
    half = math.sqrt(z2 * (count * (of - count) / of + z2 / 4)) / (of + z2)
    return max(0.0, centre - half) if count else 0.0, min(1.0, centre + half) if count < of else 1.0


def student_within(t: float, freedom: int) -> float:
    """Chance that |T| ≤ t for Student's T: the finite sums for whole degrees of freedom.

    >>> student_within(1.0, 1)
    0.5
    """
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (k - 1) / k * math.cos(angle) ** 2
    inner = math.sin(angle) * total
    return 2 / math.pi * (angle + inner) if odd else inner


@lru_cache(maxsize=1024)
def student_quantile(confidence: float, freedom: int) -> float:
    """The t within which |T| lies with that chance, by halving.

    >>> student_quantile(0.95, 4)
    2.776...
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        inside = student_within(math.tan(middle), freedom) < confidence
        low, high = (middle, high) if inside else (low, middle)
    return math.tan(low)


def as_dict(found: Estimate) -> dict[str, float | None]:
    """As results.json has it."""
    return {"value": found.value, "low": found.low, "high": found.high}


def columns(found: Sequence[Estimate]) -> dict[str, list[float | None]]:
    """Several side by side, as results.json has curves."""
    return {
        "mean": [one.value for one in found],
        "low": [one.low for one in found],
        "high": [one.high for one in found],
    }
