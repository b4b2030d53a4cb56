"""Where the intervals of a plot lie on its scale, as shares of its width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import Intervals
from .numbers import show
from .read import Estimate

MARGIN = 0.04

FAR = 3.0
"""How many times the largest value a scale may reach, to show the end of an interval."""


@dataclass(frozen=True)
class IntervalScale:
    """A linear or logarithmic scale with room for all rows."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, plot: Intervals) -> IntervalScale:
        """The scale of a plot: its values, its reference, and the ends of intervals as far as they are not far off."""
        core = usable([row.estimate.value for row in plot.rows] + [plot.reference], plot.log) or [1.0]
        ends = usable([end for row in plot.rows for end in (row.estimate.low, row.estimate.high)], plot.log)
        least, most = min(core), max(core)
        if plot.log:
            # An interval from 0.003 to 300 would leave no room for the others; it runs into the edge.
            low, high = min([least, 0.8, *ends]), max([most, 1.25, *ends])
            return cls(max(low, least / FAR), min(high, most * FAR), True)
        room = 2 * max(most - min(0.0, least), abs(most), 1e-12)
        low, high = min([0.0, least, *ends]), max([most, *ends])
        return cls(max(low, min(0.0, least) - room), max(min(high, most + room), low + 1e-12), False)

    def place(self, value: float) -> float:
        """0 … 100, clipped to the plot."""
        if self.log and value <= 0:
            return 0.0
        if math.isinf(value):
            return 100.0 if value > 0 else 0.0
        ends = (value, self.low, self.high)
        x, low, high = map(math.log, ends) if self.log else ends
        share = MARGIN + (1 - 2 * MARGIN) * (x - low) / (high - low)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def span(self, estimate: Estimate) -> tuple[float, float] | None:
        """Both ends of an interval; None where one is not known."""
        low, high = estimate.low, estimate.high
        if low is None or high is None or math.isnan(low) or math.isnan(high):
            return None
        return self.place(low), self.place(high)

    def ticks(self) -> Sequence[tuple[float, str]]:
        """A few round numbers and where they are."""
        ticks = log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)
        return [(self.place(tick), show(tick, 3)) for tick in ticks]


def usable(values: Sequence[float | None], log: bool) -> list[float]:
    return [x for x in values if x is not None and math.isfinite(x) and (x > 0 or not log)]


def log_ticks(low: float, high: float) -> list[float]:
    """
    >>> log_ticks(0.8, 3.1), log_ticks(0.8, 1.25)
    ([1, 1.5, 2, 3], [0.8, 1.0, 1.2])
    """
    steps = (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)
    found = [step for step in steps if low * 0.99 <= step <= high * 1.01]
    if len(found) < 3:
        return linear_ticks(low, high)
    return found if len(found) <= 5 else [step for step in found if step in (0.1, 0.5, 1, 2, 5, 10, 100)]


def linear_ticks(low: float, high: float) -> list[float]:
    """
    >>> linear_ticks(0, 0.37)
    [0.0, 0.1, 0.2, 0.3]
    """
    raw = (high - low) / 4
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.99)
    first = math.ceil(low / step - 1e-9)
    return [round(first * step + step * i, 12) for i in range(8) if first * step + step * i <= high * (1 + 1e-9)]
