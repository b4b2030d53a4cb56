"""A chart as the script of the page draws it, and as the table behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .blocks import STYLES, Chart, Series, Table
from .numbers import NOTHING, show, show_estimate
from .read import Estimate

TABLE_ROWS = 120
"""Rows of the table behind a chart; longer series are thinned there, and the file with all of them is named."""


def chart_data(chart: Chart) -> dict[str, Any]:
    """What the script draws."""
    views = [
        {
            "name": view.name,
            "series": [series_data(series) for series in view.series],
            "area": None if view.area is None else series_data(view.area),
        }
        for view in chart.views
    ]
    names = {"key": chart.key, "title": chart.title, "x": chart.x, "y": chart.y}
    return {**names, "logX": chart.log_x, "logY": chart.log_y, "views": views}


def series_data(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "style": series.style % STYLES,
        "points": rounded(series.points),
        "band": rounded(series.band),
        "members": [{"name": line.name, "points": rounded(line.points)} for line in series.members],
        "ended": series.ended,
    }


def rounded(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Six digits, which is more than a screen shows."""
    return [[None if value is None else float(f"{value:.6g}") for value in row] for row in rows]


def chart_table(chart: Chart) -> list[Table]:
    """The numbers behind a chart, one table per view."""
    return [view_table(chart, view.name, [*view.series, *([view.area] if view.area else [])]) for view in chart.views]


def view_table(chart: Chart, name: str, series: Sequence[Series]) -> Table:
    columns = [column for one in series for column in columns_of(one) if column[1]]
    places = sorted({x for _, cells in columns for x in cells})
    every = -(-len(places) // TABLE_ROWS) or 1
    rows = [[show(x), *(cells.get(x, NOTHING) for _, cells in columns)] for x in places[::every]]
    note = f"Every {every}th point; all are in {chart.source}." if every > 1 else ""
    return Table(f"{chart.title}{f', {name}' if name else ''}", [chart.x, *(name for name, _ in columns)], rows, note)


def columns_of(series: Series) -> list[tuple[str, dict[float, str]]]:
    """The mean with its interval, or the single runs where there is no mean: a name, and a cell for each x."""
    if series.points or series.band:
        return [(series.name, {x: show(y) for x, y in series.points} | ranges(series))]
    return [(f"{series.name}, {line.name}", {x: show(y) for x, y in line.points}) for line in series.members]


def ranges(series: Series) -> dict[float, str]:
    values = dict(series.points)
    return {
        x: show_estimate(Estimate(values.get(x), low, high)) if x in values else f"{show(low)} – {show(high)}"
        for x, low, high in series.band
    }
