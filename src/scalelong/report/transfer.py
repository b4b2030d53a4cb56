"""What the page says about widths: the losses over the rates for each, and where the best rate is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .blocks import Block, Chart, Interval, Intervals, Part, Section, Series, Text, View
from .comparison import AtWidth, Family, Transfer
from .numbers import Estimate, Points, show_estimate, show_factor

LOSSES = "Validation loss at the end over the learning rate, a curve for each width. Shaded: 95 % interval over seeds."
BEST = "The vertex of the parabola through the lowest loss of each seed; 95 % interval over seeds."
SHIFT = "The best rate of the largest width over that of the smallest, by pairs of the same seed. 1 = it has not moved."

CHANGES = "How much the first steps changed what each block gives, on the same images; the mean over seeds."
SLOPES = "Of log change over log width, with its 95 % interval; a block passes if all of it lies within ±{}."
NAMES = {"standard": "standard", "mup": "μP"}


def transfers(found: Sequence[Transfer]) -> list[Block]:
    """For each method: what was found, the losses of every width, and the best rates."""
    return [block for place, one in enumerate(found) for block in blocks_of(one, place, several=len(found) > 1)]


def blocks_of(one: Transfer, place: int, *, several: bool) -> list[Block]:
    name, end = (f"{one.label}: ", f"-{place}") if several else ("", "")
    said = [*(family.sentence for family in one.families), one.carried.sentence]
    views = [
        View(family.label, [series_of(width, k) for k, width in enumerate(family.widths)]) for family in one.families
    ]
    rows = [best_row(family, width, style) for style, family in enumerate(one.families) for width in family.widths]
    shifts = [
        Interval(family.label, style, family.shift, show_factor(family.shift), [family.sentence])
        for style, family in enumerate(one.families)
    ]
    axes = ("learning rate", "validation loss", views, "results.json")
    return [
        Text(f"{name}{one.advice}", "list", said),
        Chart(f"{name}Loss over the rate", *axes, log_x=True, key=f"transfer{end}", note=LOSSES),
        Intervals(f"{name}Best rate", "learning rate", rows, log=True, key=f"best-rate{end}", note=BEST),
        Intervals(f"{name}How far it moves", "times", shifts, reference=1.0, log=True, key=f"shift{end}", note=SHIFT),
    ]


def series_of(one: AtWidth, style: int) -> Series:
    return Series(f"width {one.width}", style, one.points, one.band)


def best_row(family: Family, one: AtWidth, style: int) -> Interval:
    return Interval(f"{family.label}, width {one.width}", style, one.best, show_estimate(one.best, 3))


def coordinates_part(found: Mapping[str, Any]) -> Part:
    """The page of a coordinate check, from its coordcheck.json."""
    series, rows = [], []
    for style, one in enumerate(found["blocks"]):
        points: Points = [(width, fmean(changes)) for width, changes in zip(one["widths"], one["changes"], strict=True)]
        series.append(Series(one["block"], style, points))
        slope = Estimate(**one["slope"])
        rows.append(Interval(one["block"], style, slope, show_estimate(slope, 2), verdict=one["verdict"]))
    said = f"rms change after {found['steps']} steps at {found['rate']:g}"
    name = f"Change of each block, {NAMES[found['parametrization']]}"
    blocks = [
        Chart(name, "width", said, [View("", series)], "coordcheck.json", log_x=True, key="change", note=CHANGES),
        Intervals(
            "Slope over the width", "slope", rows, reference=0.0, key="slope", note=SLOPES.format(found["limit"])
        ),
    ]
    verdict, state = ("passed", "finished") if found["passed"] else ("failed", "trouble")
    sections = [Section("coordinates", "Does the change depend on the width?", blocks)]
    return Part(f"{found['recipe']}: coordinate check", name, verdict, state, sections, "coordcheck")
