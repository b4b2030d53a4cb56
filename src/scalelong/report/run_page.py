"""What the page says about runs that are no comparison: one by itself, or several beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from . import sections
from .blocks import Block, Chart, Part, Section, Series, Table, Text, View
from .numbers import Points, duration, finite, plural, show, thin
from .runs import Environment, Run
from .why import why_blocks

T = TypeVar("T")

POINTS = 400
"""Points of a series that a page keeps; fewer where it has many series."""

MOST_SKIPS = 8

SINGLE = (
    "Each number is of a single run, so it has no interval, and runs that differ here need not differ again with "
    "other seeds: scalelong compare measures that."
)
SAME_IMAGES = "EMA weights, on the same validation images at every step."
SAME_NOISE = "All grids are sampled from the same noise with the EMA weights: images in the same place can be compared."
OSCILLATION = "Mean over the blocks; 0 is a series that does not move, 1 one that jumps between 1 and 3 (Fig. 1)."
ROBUSTNESS = "‖f(x+δ) − f(x)‖ / ‖δ‖ for a random δ, mean over a batch; Theorem 3.4 bounds it."
NO_NUMBERS = "No numbers yet: metrics.jsonl is empty or missing."
NO_SAMPLES = "No samples yet: scalelong sample RUN makes some."
NOT_WATCHED = "The skips were not watched. To read them every ten steps: --set training.monitor_every=10."
NOT_READ = "No coefficients were read: the skips are not scaled, or were not watched."


def runs_part(runs: Sequence[Run], album: sections.Album) -> Part:
    first, warnings = runs[0], [warning for run in runs for warning in run.warnings]
    grids = samples(runs, album, warnings)
    events = [(run.label, line) for run in runs for line in run.event_lines()]
    asked = why_blocks(first.folder, warnings) if len(runs) == 1 else []
    shown = [
        Section("result", "Result", result(runs)),
        *([Section("why", "Why it collapsed", asked)] if asked else []),
        sections.warnings_section(events, warnings),
        Section("curves", "Curves", curves(runs)),
        Section("stability", "Oscillation and robustness", stability(runs)),
        Section("coefficients", "Coefficients of the skips", coefficients(runs)),
        Section("samples", "Samples", grids),
        Section("kappa", "Which κ", sections.advice_blocks(first.kappa, first.folder, first.folder)),
        Section("setup", "What was run", setup(runs)),
    ]
    states = [run.state for run in runs]
    ended = "trouble" if "diverged" in states else "finished"
    state = ended if {*states} <= {"finished", "diverged"} else "running"
    if len(runs) == 1:
        seed = "" if first.config.seed is None else f", seed {first.config.seed}"
        return Part(first.label, f"Recipe {first.config.name}, {first.method}{seed}", first.status, state, shown)
    diverged = f", {states.count('diverged')} diverged" if "diverged" in states else ""
    title, names = plural(len(runs), "run"), ", ".join(run.label for run in runs)
    return Part(title, f"Runs: {names}", f"{states.count('finished')} of {title} finished{diverged}", state, shown)


def result(runs: Sequence[Run]) -> Sequence[Block]:
    columns = ("run", "method", "seed", "status", "validation loss, EMA weights", "raw weights", "time")
    rows = []
    for run in runs:
        losses = (show(run.last(name)) for name in ("validation_loss_ema", "validation_loss"))
        rows.append((run.label, run.method, show(run.config.seed), run.status, *losses, duration(run.seconds)))
    blocks = [Table("The last numbers", columns, rows), Text(SINGLE, "note")]
    steps = [(run, f"step {run.last_step:,} of {run.config.steps:,}") for run in runs if run.state == "unfinished"]
    unfinished = ", ".join(f"{run.label} ({reached})" for run, reached in steps)
    return [*blocks, Text(f"Unfinished: {unfinished}.", "note")] if unfinished else blocks


def curves(runs: Sequence[Run]) -> Sequence[Block]:
    shared = [run_series(runs, [run.series("validation_loss_ema") for run in runs]), SAME_IMAGES]
    if len(runs) == 1:
        pairs = (("EMA weights", 1, "validation_loss_ema"), ("raw weights", 2, "validation_loss"))
        shared = [[Series(name, style, runs[0].series(key), ended=runs[0].ended) for name, style, key in pairs], ""]
    validation = step_chart("validation", "Validation loss", "validation loss", *shared)
    charts = [replace(validation, half=False), *evaluation_charts(runs)]
    for key, title, y, name in (
        ("train", "Training loss", "loss", "loss"),
        ("grad", "Gradient norm", "norm before clipping", "grad_norm"),
    ):
        charts.append(step_chart(key, title, y, run_series(runs, [run.series(name) for run in runs])))
    return [chart for chart in charts if chart.values] or [Text(NO_NUMBERS, "empty")]


def run_series(runs: Sequence[Run], found: Sequence[Points]) -> list[Series]:
    """One series per run that has numbers."""
    most = max(60, min(POINTS, 6000 // len(runs)))
    pairs = enumerate(zip(runs, found, strict=True), start=1)
    series = [Series(run.label, style, thin(points, most), ended=run.ended) for style, (run, points) in pairs]
    return [one for one in series if one.values]


def step_chart(key: str, title: str, y: str, series: Sequence[Series], note: str = "") -> Chart:
    """A number over the steps of training."""
    return Chart(title, "step", y, [View("", series)], "metrics.jsonl", key=key, note=note, half=True)


def evaluation_charts(runs: Sequence[Run]) -> list[Chart]:
    """Figures of samples over the steps, of evaluations with the fingerprint, weights and noise of the latest one."""
    latest = next((run.evaluations[-1] for run in reversed(runs) if run.evaluations), None)
    if latest is None:
        return []
    found = latest.fingerprint
    meant = [f"{show(found.get('images'))} images", *(found[key] for key in ("sampler", "network") if found.get(key))]
    note = f"{', '.join(meant)}; 95 % intervals over images."
    alike = (latest.fingerprint, latest.weights, latest.seed)
    charts = []
    for name in list(latest.figures)[:6]:
        series = []
        for style, run in enumerate(runs, start=1):
            same = [one for one in run.evaluations if (one.fingerprint, one.weights, one.seed) == alike]
            figures = [(one.step, one.figures[name]) for one in same if name in one.figures]
            points: Points = [(step, finite(figure.value)) for step, figure in figures]
            ends = [(step, figure.ends) for step, figure in figures if figure.ends]
            band = [(step, *pair) for step, pair in ends if all(map(math.isfinite, pair))]
            series.append(Series(run.label, style, sorted(points), sorted(band)))
        # Names the element of the page and a file: letters and digits only.
        key = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
        charts.append(replace(step_chart(key, name, name, series, note), source="evaluation.json"))
    return charts


def stability(runs: Sequence[Run]) -> Sequence[Block]:
    if not any(run.readings for run in runs):
        return [Text(NOT_WATCHED, "empty")]
    charts = []
    for kind in ("feature", "gradient"):
        series = run_series(runs, [run.mean_of(rf"block/.*/{kind}_oscillation") for run in runs])
        charts.append(step_chart(f"osc-{kind}", f"Oscillation of {kind}s", "oscillation index", series, OSCILLATION))
    if len(runs) == 1:  # Those of several would not be readable.
        charts += norm_charts(runs[0])
    series = run_series(runs, [run.series("robustness") for run in runs])
    title = "Change of the output per change of the input"
    charts.append(step_chart("robust", title, "ratio", series, ROBUSTNESS))
    return [chart for chart in charts if chart.values]


def norm_charts(run: Run) -> list[Chart]:
    """The norms of every skip."""
    skips = spread(run.skips, MOST_SKIPS)
    note = "1 is the outermost skip." + ("" if len(skips) == len(run.skips) else f" {len(skips)} of {len(run.skips)}.")
    charts = []
    for kind in ("feature", "gradient"):
        points = [thin(run.series(f"skip{skip}/{kind}"), max(60, 2400 // len(skips))) for skip in skips]
        series = [Series(f"skip {skip}", style + 1, points[style]) for style, skip in enumerate(skips)]
        charts.append(step_chart(f"norm-{kind}", f"Size of the skips' {kind}s", "norm", series, note))
    return charts


def spread(items: Sequence[T], most: int) -> list[T]:
    """
    >>> spread(range(1, 13), 4)
    [1, 5, 8, 12]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def coefficients(runs: Sequence[Run]) -> Sequence[Block]:
    series = []
    for style, run in enumerate(runs, start=1):
        last, points, band = run.readings[-1].numbers if run.readings else {}, [], []
        for skip in run.skips:
            mean, low, high = (finite(last.get(f"skip{skip}/coefficient{end}")) for end in ("", "_low", "_high"))
            points.append((float(skip), mean))
            band += [] if low is None or high is None else [(float(skip), low, high)]
        series.append(Series(run.label, style, points, band))
    shown = [one for one in series if one.values]
    note = "At the last reading; the shaded range around a line is its 5 to 95 % quantile over the batch."
    charts = [sections.coefficient_chart([View("", shown)], runs[0].kappa, note, "metrics.jsonl")] if shown else []
    return charts or [Text(NOT_READ, "empty")]


def samples(runs: Sequence[Run], album: sections.Album, warnings: list[str]) -> Sequence[Block]:
    """A run by itself over its steps; several at their last."""
    if len(runs) == 1:
        chosen = [(path, name, "") for name, path in spread(runs[0].samples, 4)]
    else:
        chosen = [(path, run.label, name) for run in runs for name, path in run.samples[-1:]]
    return album.gallery("Samples", SAME_NOISE, chosen, warnings) or [Text(NO_SAMPLES, "empty")]


def setup(runs: Sequence[Run]) -> Sequence[Block]:
    again = [(run, run.shell_command) for run in runs]
    commands = [Text(f"To run {run.label} again", "command", [command]) for run, command in again if command]
    latest = runs[0].starts[-1] if runs[0].starts else Environment()
    metadata = [sections.run_metadata(runs[0]), sections.environment_metadata(latest)]
    return [*metadata, *commands, sections.settings_table(runs)]
