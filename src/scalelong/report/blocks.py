"""What a page is made of. The template draws each kind; nothing here knows where the numbers came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .read import Band, Estimate, Points

STYLES = 8
"""Colours with a dash and a marker of their own; after these they come again."""


@dataclass(frozen=True)
class Series:
    """One method, run or skip: its mean with a band, and the single runs behind it."""

    name: str
    style: int
    points: Points = field(default_factory=list)
    band: Band = field(default_factory=list)
    members: Sequence[tuple[str, Points]] = ()
    """The names and points of the runs, drawn thin."""
    ended: str = ""
    """Why the series stops early; marked with a cross."""

    @property
    def lines(self) -> list[Points]:
        return [self.points, *(points for _, points in self.members)]

    @property
    def empty(self) -> bool:
        return all(y is None for points in self.lines for _, y in points)


@dataclass(frozen=True)
class View:
    """What a chart shows at a time, such as the methods at one learning rate."""

    name: str
    series: Sequence[Series]
    area: Series | None = None
    """Drawn behind all others as a shaded range."""


@dataclass(frozen=True, kw_only=True)
class Block:
    half: bool = False
    """Whether two of these may stand beside each other."""

    @property
    def kind(self) -> str:
        """The macro of the template that draws it."""
        return type(self).__name__.lower()

    def under(self, key: str) -> Block:
        return self


@dataclass(frozen=True)
class Figure(Block):
    """What is also drawn as a file."""

    key: str
    """Names the element of the page and, without its part, the file."""
    title: str

    def under(self, key: str) -> Block:
        return replace(self, key=f"{key}-{self.key}")


@dataclass(frozen=True)
class Chart(Figure):
    x: str
    y: str
    views: Sequence[View]
    note: str = ""
    source: str = ""
    """The file that holds every value."""
    log_x: bool = False
    linear: bool = False
    """Begin with a linear axis, however far apart the values are."""

    @property
    def empty(self) -> bool:
        return all(series.empty for view in self.views for series in view.series)

    @property
    def log_y(self) -> bool:
        """Whether positive values are so far apart that a linear axis would hide the small ones."""
        every = (series for view in self.views for series in view.series)
        known = [y for series in every for points in series.lines for _, y in points if y is not None]
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
class Intervals(Figure):
    """Numbers with their intervals on one scale, one above the other."""

    axis: str
    rows: Sequence[Interval]
    note: str = ""
    reference: float | None = None
    """Where a line is drawn: what no difference would be."""
    log: bool = False

    @property
    def empty(self) -> bool:
        return not any(row.estimate.known for row in self.rows)


@dataclass(frozen=True)
class Table(Block):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell of each is its heading."""
    note: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Metadata(Block):
    """Terms and what they are."""

    title: str
    rows: Sequence[tuple[str, str]]
    half: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class Text(Block):
    lines: Sequence[str]
    tone: str = ""
    """"": plain, "note": small, "warning": marked, "list": a first line and points under it, "empty": in the place of
    something that is not there."""


@dataclass(frozen=True)
class Command(Block):
    """Something to paste into a shell."""

    label: str
    text: str


@dataclass(frozen=True)
class Picture:
    label: str
    detail: str
    source: str
    """A data: address."""
    width: int
    height: int
    pixelated: bool


@dataclass(frozen=True)
class Gallery(Block):
    """Pictures side by side."""

    title: str
    pictures: Sequence[Picture]
    note: str = ""


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
    """All about one comparison, or about a group of runs."""

    title: str
    subtitle: str
    status: str
    """A few words; `state` is one of finished, running and trouble."""
    state: str
    sections: Sequence[Section]
    key: str = ""

    def under(self, key: str) -> Part:
        """The same with a key before those of its sections and charts, as a page with several parts needs."""
        sections = [
            replace(section, key=f"{key}-{section.key}", blocks=[block.under(key) for block in section.blocks])
            for section in self.sections
        ]
        return replace(self, key=key, sections=sections)

    @property
    def blocks(self) -> list[Block]:
        return [block for section in self.sections for block in section.blocks]
