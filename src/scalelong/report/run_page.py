"""What the page says about runs that are no comparison: one by itself, or several beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from .blocks import Block, Chart, Command, Part, Section, Series, Table, Text, View
from .numbers import duration, plural, show, thin
from .pictures import Album
from .read import Environment, Evaluation, Points, finite
from .runs import Run
from .shared import (
    advice_blocks,
    coefficient_chart,
    environment_metadata,
    gallery,
    run_metadata,
    settings_table,
    warnings_section,
)

T = TypeVar("T")

POINTS = 400
"""Points of a series that a page keeps; fewer where it has many series."""

MOST_SKIPS = 8

SINGLE = (
    "Each number is of a single run, so it has no interval, and runs that differ here need not differ again with "
    "other seeds: scalelong compare measures that."
)
OSCILLATION = "Mean over the blocks; 0 is a series that does not move, 1 one that jumps between 1 and 3 (Fig. 1)."
ROBUSTNESS = "‖f(x+δ) − f(x)‖ / ‖δ‖ for a random δ, mean over a batch; Theorem 3.4 bounds it."
NOT_WATCHED = "The skips were not watched. To read them every ten steps: --set training.monitor_every=10."


def runs_part(runs: Sequence[Run], album: Album) -> Part:
    """All about a group of runs."""
    first, warnings = runs[0], [warning for run in runs for warning in run.warnings]
    grids = samples(runs, album, warnings)
    events = [(run.label, line) for run in runs for line in run.event_lines()]
    sections = [
        Section("result", "Result", result(runs)),
        warnings_section(events, warnings),
        Section("curves", "Curves", curves(runs)),
        Section("stability", "Oscillation and robustness", stability(runs)),
        Section("coefficients", "Coefficients of the skips", coefficients(runs)),
        Section("samples", "Samples", grids),
        Section("kappa", "Which κ", advice_blocks(first.kappa, first.folder, first.folder)),
        Section("setup", "What was run", setup(runs)),
    ]
    states = [run.state for run in runs]
    state = (
        "running" if not {*states} <= {"finished", "diverged"} else "trouble" if "diverged" in states else "finished"
    )
    if len(runs) == 1:
        seed = "" if first.config.seed is None else f", seed {first.config.seed}"
        subtitle = f"Recipe {first.config.name}, {first.method}{seed}"
        return Part(first.label, subtitle, first.status, state, sections)
    diverged = f", {states.count('diverged')} diverged" if "diverged" in states else ""
    status = f"{states.count('finished')} of {plural(len(runs), 'run')} finished{diverged}"
    subtitle = "Runs: " + ", ".join(run.label for run in runs)
    return Part(plural(len(runs), "run"), subtitle, status, state, sections)


def result(runs: Sequence[Run]) -> list[Block]:
    columns = ("run", "method", "seed", "status", "validation loss, EMA weights", "raw weights", "time")
    rows = []
    for run in runs:
        losses = (show(run.last(name)) for name in ("validation_loss_ema", "validation_loss"))
        rows.append((run.label, run.method, show(run.config.seed), run.status, *losses, duration(run.seconds)))
    unfinished = [
        f"{run.label} (step {run.last_step:,} of {run.config.steps:,})" for run in runs if run.state == "unfinished"
    ]
    lines = [SINGLE, *([f"Unfinished: {', '.join(unfinished)}."] if unfinished else [])]
    return [Table("The last numbers", columns, rows), *(Text([line], "note") for line in lines)]


# Curves


def curves(runs: Sequence[Run]) -> list[Block]:
    charts = [
        validation_chart(runs),
        *evaluation_charts(runs),
        run_chart("train", "Training loss", "loss", runs, lambda run: run.series("loss")),
        run_chart("grad", "Gradient norm", "norm before clipping", runs, lambda run: run.series("grad_norm")),
    ]
    shown = [chart for chart in charts if not chart.empty]
    return [*shown] or [Text(["No numbers yet: metrics.jsonl is empty or missing."], "empty")]


def run_chart(
    key: str, title: str, y: str, runs: Sequence[Run], points: Callable[[Run], Points], note: str = ""
) -> Chart:
    """One series per run."""
    most = max(60, min(POINTS, 6000 // len(runs)))
    series = [
        Series(run.label, style, thin(points(run), most), ended=run.ended) for style, run in enumerate(runs, start=1)
    ]
    return step_chart(key, title, y, [one for one in series if not one.empty], note)


def step_chart(key: str, title: str, y: str, series: Sequence[Series], note: str = "") -> Chart:
    """A number over the steps of training."""
    return Chart(key, title, "step", y, [View("", series)], note, "metrics.jsonl", half=True)


def validation_chart(runs: Sequence[Run]) -> Chart:
    name, title, y = "validation", "Validation loss", "validation loss"
    if len(runs) > 1:
        note = "EMA weights, on the same validation images at every step."
        made = run_chart(name, title, y, runs, lambda run: run.series("validation_loss_ema"), note)
        return replace(made, half=False)
    (run,) = runs
    pairs = (("EMA weights", 1, "validation_loss_ema"), ("raw weights", 2, "validation_loss"))
    series = [Series(label, style, run.series(column), ended=run.ended) for label, style, column in pairs]
    return replace(step_chart(name, title, y, series), half=False)


def evaluation_charts(runs: Sequence[Run]) -> list[Chart]:
    """Figures of samples over the steps, of evaluations that may be compared with the latest one."""
    latest = next((run.evaluations[-1] for run in reversed(runs) if run.evaluations), None)
    if latest is None:
        return []
    found = latest.fingerprint
    meant = [f"{show(found.get('images'))} images", *(found[key] for key in ("sampler", "network") if found.get(key))]
    note = f"{', '.join(meant)}; 95 % intervals over images."
    charts = []
    for name in list(latest.figures)[:6]:
        series = [figure_series(run, name, style, latest) for style, run in enumerate(runs, start=1)]
        # Names the element of the page and a file: letters and digits only.
        slug = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
        chart = step_chart(f"{slug}", name, name, series, note)
        charts.append(replace(chart, source="evaluation.json"))
    return charts


def figure_series(run: Run, name: str, style: int, latest: Evaluation) -> Series:
    """One figure of the evaluations that mean the same as the latest, and used the same weights and noise."""
    meant = (latest.fingerprint, latest.weights, latest.seed)
    found = [
        (one.step, one.figures[name])
        for one in run.evaluations
        if (one.fingerprint, one.weights, one.seed) == meant and name in one.figures
    ]
    points: Points = [(step, finite(figure.value)) for step, figure in found]
    band = [(step, *figure.ends) for step, figure in found if figure.ends and all(map(math.isfinite, figure.ends))]
    return Series(run.label, style, sorted(points), sorted(band))


# Stability


def stability(runs: Sequence[Run]) -> list[Block]:
    if not any(run.readings for run in runs):
        return [Text([NOT_WATCHED], "empty")]
    charts = []
    for kind in ("feature", "gradient"):
        pattern = rf"block/.*/{kind}_oscillation"
        name, title, y = f"osc-{kind}", f"Oscillation of {kind}s", "oscillation index"
        charts.append(run_chart(name, title, y, runs, lambda run, pattern=pattern: run.mean_of(pattern), OSCILLATION))
    if len(runs) == 1:  # Those of several would not be readable.
        charts += norm_charts(runs[0])
    title, y = "Change of the output per change of the input", "ratio"
    charts.append(run_chart("robust", title, y, runs, lambda run: run.series("robustness"), ROBUSTNESS))
    return [chart for chart in charts if not chart.empty]


def norm_charts(run: Run) -> list[Chart]:
    """The norms of every skip."""
    skips = spread(run.skips, MOST_SKIPS)
    note = "1 is the outermost skip." + ("" if len(skips) == len(run.skips) else f" {len(skips)} of {len(run.skips)}.")
    charts = []
    for kind in ("feature", "gradient"):
        series = [
            Series(f"skip {skip}", style, thin(run.series(f"skip{skip}/{kind}"), max(60, 2400 // len(skips))))
            for style, skip in enumerate(skips, start=1)
        ]
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


def coefficients(runs: Sequence[Run]) -> list[Block]:
    series = [one for style, run in enumerate(runs, start=1) if not (one := coefficient_series(run, style)).empty]
    if not series:
        return [Text(["No coefficients were read: the skips are not scaled, or were not watched."], "empty")]
    note = "At the last reading; the shaded range around a line is its 5 to 95 % quantile over the batch."
    return [coefficient_chart([View("", series)], runs[0].kappa, note, "metrics.jsonl")]


def coefficient_series(run: Run, style: int) -> Series:
    last = run.readings[-1].numbers if run.readings else {}
    points, band = [], []
    for skip in run.skips:
        mean, low, high = (finite(last.get(f"skip{skip}/coefficient{end}")) for end in ("", "_low", "_high"))
        points.append((float(skip), mean))
        band += [] if low is None or high is None else [(float(skip), low, high)]
    return Series(run.label, style, points, band)


# Samples and settings


def samples(runs: Sequence[Run], album: Album, warnings: list[str]) -> list[Block]:
    """A run by itself over its steps; several at their last."""
    if len(runs) == 1:
        chosen = [(path, name, "") for name, path in spread(runs[0].samples, 4)]
    else:
        chosen = [(path, run.label, name) for run in runs for name, path in run.samples[-1:]]
    note = "All grids are sampled from the same noise with the EMA weights: images in the same place can be compared."
    nothing = "No samples yet: scalelong sample RUN makes some."
    return [*gallery("Samples", chosen, note, album, warnings)] or [Text([nothing], "empty")]


def setup(runs: Sequence[Run]) -> list[Block]:
    commands = [Command(f"To run {run.label} again", run.shell_command) for run in runs if run.shell_command]
    latest = runs[0].starts[-1] if runs[0].starts else Environment()
    return [run_metadata(runs[0]), environment_metadata(latest), *commands, settings_table(runs)]
