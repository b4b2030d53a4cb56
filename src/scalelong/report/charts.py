"""Charts as the script of the page draws them, the tables behind them, and the scales of intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .blocks import STYLES, Chart, Intervals, Series, Table, View
from .numbers import NOTHING, show, show_estimate
from .read import Estimate, finite

TABLE_ROWS = 120
"""Rows of the table behind a chart; longer series are thinned there, and the file with all of them is named."""


def chart_data(chart: Chart) -> dict[str, Any]:
    """What the script draws."""
    views = []
    for view in chart.views:
        area = None if view.area is None else series_data(view.area)
        views.append({"name": view.name, "series": [series_data(series) for series in view.series], "area": area})
    names = {"key": chart.key, "title": chart.title, "x": chart.x, "y": chart.y}
    return {**names, "logX": chart.log_x, "logY": chart.log_y, "views": views}


def series_data(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "style": series.style % STYLES,
        "points": rounded(series.points),
        "band": rounded(series.band),
        "members": [{"name": name, "points": rounded(points)} for name, points in series.members],
        "ended": series.ended,
    }


def rounded(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Six digits, which is more than a screen shows."""
    return [[None if value is None else float(f"{value:.6g}") for value in row] for row in rows]


def chart_table(chart: Chart, view: View) -> Table:
    """The numbers behind a view of a chart."""
    series = [*view.series, view.area] if view.area else view.series
    columns = [(name, cells) for one in series for name, cells in columns_of(one) if cells]
    places = sorted({x for _, cells in columns for x in cells})
    every = -(-len(places) // TABLE_ROWS) or 1
    rows = [[show(x), *(cells.get(x, NOTHING) for _, cells in columns)] for x in places[::every]]
    note = f"Every {every}th point; all are in {chart.source}." if every > 1 else ""
    title = f"{chart.title}, {view.name}" if view.name else chart.title
    return Table(title, [chart.x, *(name for name, _ in columns)], rows, note)


def columns_of(series: Series) -> list[tuple[str, dict[float, str]]]:
    """The mean with its interval, or the single runs where there is no mean: a name, and a cell for each x."""
    if not series.points and not series.band:
        return [(f"{series.name}, {name}", {x: show(y) for x, y in points}) for name, points in series.members]
    means = dict(series.points)
    cells = {x: show(y) for x, y in series.points}
    for x, low, high in series.band:
        cells[x] = show_estimate(Estimate(means[x], low, high)) if x in means else f"{show(low)} – {show(high)}"
    return [(series.name, cells)]


MARGIN = 0.04

FAR = 3.0
"""How many times the largest value a scale may reach, to show the end of an interval."""


@dataclass(frozen=True)
class IntervalScale:
    """A linear or logarithmic scale with room for all rows of a plot of intervals."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, plot: Intervals) -> IntervalScale:
        """The scale of a plot: its values, its reference, and the ends of intervals as far as they are not far off."""
        estimates = [row.estimate for row in plot.rows]
        core = usable([*(estimate.value for estimate in estimates), plot.reference], plot.log) or [1.0]
        ends = usable([end for estimate in estimates for end in (estimate.low, estimate.high)], plot.log)
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
        return estimate.ends and (self.place(estimate.ends[0]), self.place(estimate.ends[1]))

    def ticks(self) -> Sequence[tuple[float, str]]:
        """A few round numbers and where they are."""
        ticks = log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)
        return [(self.place(tick), show(tick, 3)) for tick in ticks]


def usable(values: Sequence[float | None], log: bool) -> list[float]:
    return [x for x in map(finite, values) if x is not None and (x > 0 or not log)]


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
