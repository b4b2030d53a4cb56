"""Every figure of a page as files, PNG and SVG, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .blocks import STYLES, Chart, Intervals, Series, View
from .numbers import Points
from .page import Content

# The colours of the page on white: grey, and Okabe and Ito's, which stay apart for the colour-blind.
COLOURS = ("#666666", "#D55E00", "#0072B2", "#009E73", "#C0679A", "#B07A00", "#3A93C9", "#7A5195")
DASHES = ("--", "-", "-", "-", "-", ":", "-.", "--")
MARKERS = ("o", "o", "s", "^", "D")
MOST_MARKERS, MOST_TICKS = 24, 12

STYLE: dict[Any, Any] = {
    **{"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    # Names are drawn as they are: a dollar sign is no formula. Text in an SVG stays text.
    **{"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "scalelong"},
}


def draw_figures(content: Content, folder: Path) -> list[Path]:
    """Write all charts and plots of intervals: validation.png, or c1-validation.png of the second comparison."""
    written: list[Path] = []
    prefix = f"{content.parts[0].key}-" if len(content.parts) == 1 else ""
    for chart in content.charts:
        key = chart.key.removeprefix(prefix)
        for place, view in enumerate(chart.views, start=1):
            with figure(folder / (key if len(chart.views) == 1 else f"{key}-{place}"), written) as axes:
                draw_view(axes, chart, view)
    for plot in content.intervals:
        if plot.values:
            with figure(folder / plot.key.removeprefix(prefix), written, height=1.2 + 0.45 * len(plot.rows)) as axes:
                draw_intervals(axes, plot)
    return written


@contextmanager
def figure(path: Path, written: list[Path], *, height: float = 4.2) -> Iterator[Any]:
    """The axes of a figure that is written as PNG and SVG when the block ends."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(6.4, height), layout="constrained")
        yield drawn.subplots()
        path.parent.mkdir(parents=True, exist_ok=True)
        png, svg = (path.with_name(f"{path.name}.{ending}") for ending in ("png", "svg"))
        drawn.savefig(png, dpi=160)
        drawn.savefig(svg, metadata={"Date": None})
        written += [png, svg]


def clipped(name: str, most: int = 60) -> str:
    """A name that leaves room for the figure."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def draw_view(axes: Any, chart: Chart, view: View) -> None:
    from matplotlib.ticker import LogFormatter, NullLocator

    if view.area is not None:
        draw_band(axes, view.area, label=clipped(view.area.name))
    for series in view.series:
        draw_series(axes, series)
    title = chart.title if len(chart.views) == 1 else f"{chart.title}, {view.name}"
    axes.set(title=clipped(title), xlabel=chart.x, ylabel=chart.y)
    axes.set(xscale="log" if chart.log_x else "linear", yscale="log" if chart.log_y else "linear")
    places = sorted({x for series in view.series for line in series.lines for x, _ in line})
    if len(places) <= MOST_TICKS and (chart.log_x or all(place == int(place) for place in places)):
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), LogFormatter):  # Matplotlib's own writes powers as formulas.
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.grid(axis="y", color="#e9ecf1")
    # Under the axes, where it hides no curve.
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)


def draw_band(axes: Any, series: Series, **options: Any) -> None:
    x, low, high = zip(*series.band, strict=True)
    axes.fill_between(x, low, high, color=COLOURS[series.style % STYLES], alpha=0.15, linewidth=0, **options)


def draw_series(axes: Any, series: Series) -> None:
    colour, dash = COLOURS[series.style % STYLES], DASHES[series.style % STYLES]
    label = clipped(f"{series.name} ({series.ended})" if series.ended else series.name)
    for place, (_, points) in enumerate(series.members):
        # A series without a mean is named by its first run.
        name = label if not series.points and place == 0 else None
        marker = "." if len(points) == 1 else None
        axes.plot(*columns(points), color=colour, linewidth=0.8, alpha=0.5, marker=marker, label=name)
    if series.band:
        draw_band(axes, series)
    if series.points:
        marker = MARKERS[series.style % len(MARKERS)] if len(series.points) <= MOST_MARKERS else None
        drawn = {"color": colour, "linestyle": dash, "linewidth": 2, "marker": marker, "markersize": 4}
        axes.plot(*columns(series.points), **drawn, label=label)


def columns(points: Points) -> Any:
    """x and y, with NaN for what is missing, which leaves a gap."""
    return np.array(points, dtype=float).reshape(-1, 2).T


def draw_intervals(axes: Any, plot: Intervals) -> None:
    """The first row on top."""
    for place, row in enumerate(reversed(plot.rows)):
        colour, estimate = COLOURS[row.style % STYLES], row.estimate
        if estimate.ends and all(map(math.isfinite, estimate.ends)):
            axes.plot(estimate.ends, [place, place], color=colour, linewidth=3, alpha=0.5, solid_capstyle="round")
        if estimate.known:
            axes.plot([estimate.value], [place], "o", color=colour, markersize=8)
    if plot.reference is not None:
        axes.axvline(plot.reference, color=COLOURS[0], linewidth=1, linestyle=":")
    axes.set_yticks(range(len(plot.rows)), [clipped(row.label, 30) for row in reversed(plot.rows)])
    axes.set(title=clipped(plot.title), xlabel=plot.axis, ylim=(-0.6, len(plot.rows) - 0.4))
