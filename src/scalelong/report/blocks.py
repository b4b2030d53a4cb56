"""What a page is made of. The template draws each kind of block; nothing here knows where the numbers came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from .numbers import NOTHING, Band, Estimate, Points, finite, show, show_estimate

STYLES = 8
"""Colours with a dash and a marker of their own; after these they come again."""

TABLE_ROWS = 120
"""Rows of the table behind a chart; longer series are thinned there, and the file with all of them is named."""

MARGIN = 0.04

FAR = 3.0
"""How many times the largest value a scale may reach, to show the end of an interval."""


@dataclass(frozen=True)
class Series:
    """One method, run or skip: its mean with a band, and the single runs behind it, drawn thin."""

    name: str
    style: int
    points: Points = field(default_factory=list)
    band: Band = field(default_factory=list)
    members: Sequence[tuple[str, Points]] = ()
    ended: str = ""
    """Why the series stops early; marked with a cross."""

    @property
    def lines(self) -> list[Points]:
        return [self.points, *(points for _, points in self.members)]

    @property
    def values(self) -> list[float]:
        return [y for points in self.lines for _, y in points if y is not None]


@dataclass(frozen=True)
class View:
    """What a chart shows at a time, such as the methods at one learning rate; the area is shaded behind it."""

    name: str
    series: Sequence[Series]
    area: Series | None = None


@dataclass(frozen=True)
class Block:
    """`key` names its element and its file, and two with `half` may stand beside each other."""

    title: str
    _: KW_ONLY
    note: str = ""
    key: str = ""
    half: bool = False

    @property
    def kind(self) -> str:
        """The macro of the template that draws it."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Chart(Block):
    x: str
    y: str
    views: Sequence[View]
    source: str
    """The file that holds every value."""
    log_x: bool = False
    linear: bool = False
    """Begin with a linear axis, however far apart the values are."""

    @property
    def values(self) -> list[float]:
        return [y for view in self.views for series in view.series for y in series.values]

    @property
    def log_y(self) -> bool:
        """Whether positive values are so far apart that a linear axis would hide the small ones."""
        known = self.values
        return not self.linear and bool(known) and min(known) > 0 and max(known) / min(known) > 8


@dataclass(frozen=True)
class Interval:
    """A row of a plot of intervals."""

    label: str
    style: int
    estimate: Estimate
    text: str
    details: Sequence[str] = ()
    verdict: str = ""


@dataclass(frozen=True)
class Intervals(Block):
    """Numbers with their intervals on one scale; a line at the reference is where no difference would be."""

    axis: str
    rows: Sequence[Interval]
    reference: float | None = None
    log: bool = False

    @property
    def values(self) -> list[float]:
        return usable([row.estimate.value for row in self.rows])


@dataclass(frozen=True)
class Table(Block):
    """The first cell of each row is its heading."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass(frozen=True)
class Metadata(Block):
    """Terms and what they are."""

    rows: Sequence[tuple[str, str]]
    half: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class Text(Block):
    """A sentence in a tone: "note" is small, "warning" and "list" have points under it, "empty" stands in the place of
    what is missing, and "command" names the line to paste into a shell."""

    tone: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Picture:
    """`source` is a data: address."""

    label: str
    detail: str
    source: str
    width: int
    height: int
    pixelated: bool


@dataclass(frozen=True)
class Gallery(Block):
    """Pictures side by side."""

    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    blocks: Sequence[Block]

    def rows(self) -> list[list[Block]]:
        """The blocks in rows of one, or of two that are made to stand beside each other."""
        rows: list[list[Block]] = []
        for block in self.blocks:
            if block.half and rows and len(rows[-1]) == 1 and rows[-1][0].half:
                rows[-1].append(block)
            else:
                rows.append([block])
        return rows


@dataclass(frozen=True)
class Part:
    """All about one comparison, or about a group of runs; `state` is one of finished, running and trouble."""

    title: str
    subtitle: str
    status: str
    state: str
    sections: Sequence[Section]
    key: str = ""

    def under(self, key: str) -> Part:
        """The same with a key before those of its sections and blocks, as a page with several parts needs."""
        sections = []
        for section in self.sections:
            blocks = [replace(block, key=f"{key}-{block.key}") for block in section.blocks]
            sections.append(replace(section, key=f"{key}-{section.key}", blocks=blocks))
        return replace(self, key=key, sections=sections)

    @property
    def blocks(self) -> list[Block]:
        return [block for section in self.sections for block in section.blocks]


# What the script and the template draw of charts and intervals


def chart_data(chart: Chart) -> dict[str, Any]:
    """What the script draws."""
    views = []
    for view in chart.views:
        area = None if view.area is None else series_data(view.area)
        views.append({"name": view.name, "series": [series_data(series) for series in view.series], "area": area})
    names = {"key": chart.key, "title": chart.title, "x": chart.x, "y": chart.y}
    return {**names, "logX": chart.log_x, "logY": chart.log_y, "views": views}


def series_data(series: Series) -> dict[str, Any]:
    members = [{"name": name, "points": rounded(points)} for name, points in series.members]
    drawn = {"points": rounded(series.points), "band": rounded(series.band), "members": members}
    return {"name": series.name, "style": series.style % STYLES, **drawn, "ended": series.ended}


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
    return Table(title, [chart.x, *(name for name, _ in columns)], rows, note=note)


def columns_of(series: Series) -> list[tuple[str, dict[float, str]]]:
    """The mean with its interval, or the single runs where there is no mean: a name, and a cell for each x."""
    if not series.points and not series.band:
        return [(f"{series.name}, {name}", {x: show(y) for x, y in points}) for name, points in series.members]
    means = dict(series.points)
    cells = {x: show(y) for x, y in series.points}
    for x, low, high in series.band:
        cells[x] = show_estimate(Estimate(means[x], low, high)) if x in means else f"{show(low)} – {show(high)}"
    return [(series.name, cells)]


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


def usable(values: Sequence[float | None], log: bool = False) -> list[float]:
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
