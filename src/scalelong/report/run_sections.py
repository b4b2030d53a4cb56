"""What the page says about runs that are no comparison: one by itself, or several beside each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .blocks import Block, Chart, Command, Gallery, Part, Section, Series, Table, Text, View
from .common import advice_blocks, cs_area, environment_facts, run_facts, settings_table, warnings_section
from .numbers import Points, duration, plural, show, thin
from .pictures import Album
from .read import as_dict, as_text, finite
from .runs import RunFolder, event_lines, shell_command

POINTS = 400
"""Points of a series that a page keeps; fewer where it has many series."""

MOST_SKIPS = 8


def runs_part(key: str, runs: Sequence[RunFolder], album: Album) -> Part:
    """All about a group of runs."""
    sections = [
        Section(f"{key}-result", "Result", [result_table(runs), *single_remark(runs)]),
        Section(f"{key}-curves", "Curves", curves(key, runs)),
        Section(f"{key}-stability", "Oscillation and robustness", stability(key, runs)),
        Section(f"{key}-coefficients", "Coefficients of the skips", coefficients(key, runs)),
        Section(f"{key}-samples", "Samples", samples(runs, album)),
        Section(f"{key}-kappa", "Which κ", advice_blocks(runs[0].kappa, runs[0].folder, runs[0].folder)),
        Section(f"{key}-setup", "What was run", setup(runs)),
    ]
    unusual = [(run.label, event_lines(run)) for run in runs]
    noted = [*album.notes.lines, *(note for run in runs for note in run.notes)]
    sections.insert(1, warnings_section(key, unusual, noted))
    title = runs[0].label if len(runs) == 1 else plural(len(runs), "run")
    return Part(key, title, subtitle(runs), status(runs), state(runs), sections)


def subtitle(runs: Sequence[RunFolder]) -> str:
    first = runs[0]
    if len(runs) == 1:
        seed = "" if first.seed is None else f", seed {first.seed}"
        return f"Recipe {first.recipe}, {first.method}{seed}"
    return "Runs: " + ", ".join(run.label for run in runs)


def state(runs: Sequence[RunFolder]) -> str:
    states = {run.state for run in runs}
    if not states <= {"finished", "diverged"}:
        return "running"
    return "trouble" if "diverged" in states else "finished"


def status(runs: Sequence[RunFolder]) -> str:
    if len(runs) == 1:
        return runs[0].status
    done = sum(run.state == "finished" for run in runs)
    lost = sum(run.state == "diverged" for run in runs)
    return f"{done} of {plural(len(runs), 'run')} finished" + (f", {lost} diverged" if lost else "")


def result_table(runs: Sequence[RunFolder]) -> Table:
    columns = ("run", "method", "seed", "status", "validation loss, EMA weights", "raw weights", "time")
    rows = [
        (
            *(run.label, run.method, show(run.seed), run.status),
            *(show(run.last("validation_loss_ema")), show(run.last("validation_loss")), duration(run.seconds)),
        )
        for run in runs
    ]
    return Table("The last numbers", columns, rows)


def single_remark(runs: Sequence[RunFolder]) -> list[Block]:
    text = (
        "Each number is of a single run, so it has no interval, and runs that differ here need not differ again with "
        "other seeds: scalelong compare measures that."
    )
    unfinished = [run for run in runs if run.state == "unfinished"]
    return [Text([text], "note"), *([Text([unfinished_line(unfinished)], "note")] if unfinished else [])]


def unfinished_line(runs: Sequence[RunFolder]) -> str:
    return f"Unfinished: {', '.join(f'{run.label} (step {run.last_step:,} of {run.steps:,})' for run in runs)}."


# Curves


def curves(key: str, runs: Sequence[RunFolder]) -> list[Block]:
    charts = [
        validation_chart(key, runs),
        *evaluation_charts(key, runs),
        run_chart(f"{key}-train", "Training loss", "loss", runs, lambda run: run.series("loss")),
        run_chart(f"{key}-grad", "Gradient norm", "norm before clipping", runs, lambda run: run.series("grad_norm")),
    ]
    shown = [chart for chart in charts if not chart.empty]
    return list(shown) or [Text(["No numbers yet: metrics.jsonl is empty or missing."], "empty")]


def run_chart(
    key: str, title: str, y: str, runs: Sequence[RunFolder], points: Callable[[RunFolder], Points], note: str = ""
) -> Chart:
    """One series per run."""
    most = max(60, min(POINTS, 6000 // len(runs)))
    series = [
        Series(run.label, style + 1, thin(points(run), most), ended="diverged" if run.state == "diverged" else "")
        for style, run in enumerate(runs)
    ]
    return chart(key, title, y, [one for one in series if not one.empty], note)


def chart(key: str, title: str, y: str, series: Sequence[Series], note: str = "") -> Chart:
    """A number over the steps of training."""
    return Chart(key, title, "step", y, [View("", series)], note, "metrics.jsonl", half=True)


def validation_chart(key: str, runs: Sequence[RunFolder]) -> Chart:
    name, title, y = f"{key}-validation", "Validation loss", "validation loss"
    if len(runs) > 1:
        note = "EMA weights (EMA), on the same validation images at every step."
        made = run_chart(name, title, y, runs, lambda run: run.series("validation_loss_ema"), note)
        return replace(made, half=False)
    run = runs[0]
    ended = "diverged" if run.state == "diverged" else ""
    pairs = (("EMA weights (EMA)", 1, "validation_loss_ema"), ("weights of the step itself", 2, "validation_loss"))
    series = [Series(label, style, run.series(column), ended=ended) for label, style, column in pairs]
    return replace(chart(name, title, y, series), half=False)


def evaluation_charts(key: str, runs: Sequence[RunFolder]) -> list[Chart]:
    """Figures of samples over the steps, of evaluations that may be compared with the latest one."""
    latest = next((run.evaluations[-1] for run in reversed(runs) if run.evaluations), None)
    if latest is None:
        return []
    facts, weights = identity(latest), latest.get("weights")
    charts = []
    for name in list(as_dict(latest.get("figures")))[:6]:
        series = [
            figure_series(run, name, style + 1, [one for one in run.evaluations if identity(one) == facts], weights)
            for style, run in enumerate(runs)
        ]
        note = f"{describe_facts(as_dict(latest.get('facts')))}; 95 % intervals over images."
        made = Chart(f"{key}-{slug(name)}", name, "step", name, [View("", series)], note, "evaluation.json", half=True)
        charts.append(made)
    return charts


def figure_series(run: RunFolder, name: str, style: int, evaluations: Sequence[dict[str, Any]], weights: Any) -> Series:
    points, band = [], []
    for one in evaluations:
        step, figure = finite(one.get("step")), as_dict(as_dict(one.get("figures")).get(name))
        if step is None or one.get("weights") != weights:
            continue
        points.append((step, finite(figure.get("value"))))
        low, high = finite(figure.get("low")), finite(figure.get("high"))
        if low is not None and high is not None:
            band.append((step, low, high))
    return Series(run.label, style, sorted(points), sorted(band))


def identity(evaluation: dict[str, Any]) -> str:
    """Equal for figures that mean the same, and were drawn from the same noise."""
    return json.dumps([evaluation.get("fingerprint"), evaluation.get("seed", 0)], sort_keys=True, default=str)


def describe_facts(facts: dict[str, Any]) -> str:
    parts = [f"{show(facts.get('images'))} images", as_text(facts.get("sampler")), as_text(facts.get("network"))]
    return ", ".join(part for part in parts if part)


def slug(name: str) -> str:
    """
    >>> slug("FD-EffNet (ema)")
    'fd-effnet--ema-'
    """
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())


# Stability


def stability(key: str, runs: Sequence[RunFolder]) -> list[Block]:
    if not any(run.readings for run in runs):
        text = "The skips were not watched. To read them every ten steps: --set training.monitor_every=10."
        return [Text([text], "empty")]
    charts = [*oscillation_charts(key, runs), *norm_charts(key, runs), robustness_chart(key, runs)]
    return [chart for chart in charts if not chart.empty]


def oscillation_charts(key: str, runs: Sequence[RunFolder]) -> list[Chart]:
    """The index of the paper's Figure 1, for features and for gradients."""
    note = "Mean over the blocks; 0 is a series that does not move, 1 one that jumps between 1 and 3 (Fig. 1)."

    def one(name: str, title: str) -> Chart:
        pattern = rf"block/.*/{name}_oscillation"
        return run_chart(f"{key}-osc-{name}", title, "oscillation index", runs, lambda run: run.mean_of(pattern), note)

    return [one("feature", "Oscillation of features"), one("gradient", "Oscillation of gradients")]


def norm_charts(key: str, runs: Sequence[RunFolder]) -> list[Chart]:
    """The norms of every skip, for a run by itself; those of several would not be readable."""
    if len(runs) > 1 or not runs[0].skips:
        return []
    run, skips = runs[0], spread(runs[0].skips, MOST_SKIPS)
    note = "1 is the outermost skip." + ("" if len(skips) == len(run.skips) else f" {len(skips)} of {len(run.skips)}.")
    most = max(60, 2400 // len(skips))
    charts = []
    for name, title in (("feature", "Size of the skips' features"), ("gradient", "Size of the skips' gradients")):
        series = [
            Series(f"skip {skip}", style + 1, thin(run.series(f"skip{skip}/{name}"), most))
            for style, skip in enumerate(skips)
        ]
        charts.append(chart(f"{key}-norm-{name}", title, "norm", series, note))
    return charts


def spread(items: Sequence[int], most: int) -> list[int]:
    """
    >>> spread(range(1, 13), 4)
    [1, 5, 8, 12]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def robustness_chart(key: str, runs: Sequence[RunFolder]) -> Chart:
    note = "‖f(x+δ) − f(x)‖ / ‖δ‖ for a random δ, mean over a batch; Theorem 3.4 bounds it."
    title, y = "Change of the output per change of the input", "ratio"
    return run_chart(f"{key}-robust", title, y, runs, lambda run: run.series("robustness"), note)


# Coefficients


def coefficients(key: str, runs: Sequence[RunFolder]) -> list[Block]:
    series = [one for style, run in enumerate(runs) if not (one := coefficient_series(run, style + 1)).empty]
    if not series:
        return [Text(["No coefficients were read: the skips are not scaled, or were not watched."], "empty")]
    count = max(int(x) for one in series for x, _ in one.points)
    note = "At the last reading; the shaded range around a line is its 5 to 95 % quantile over the batch."
    view = View("", series, cs_area(runs[0].kappa, count))
    title = "Coefficient of each skip (Fig. 7)"
    return [Chart(f"{key}-coef", title, "skip, 1 = outermost", "κᵢ", [view], note, "metrics.jsonl", linear=True)]


def coefficient_series(run: RunFolder, style: int) -> Series:
    last = run.readings[-1] if run.readings else {}
    points = [(float(skip), finite(last.get(f"skip{skip}/coefficient"))) for skip in run.skips]
    band = []
    for skip in run.skips:
        low, high = (finite(last.get(f"skip{skip}/coefficient_{end}")) for end in ("low", "high"))
        if low is not None and high is not None:
            band.append((float(skip), low, high))
    return Series(run.label, style, points, band)


# Samples and settings


def samples(runs: Sequence[RunFolder], album: Album) -> list[Block]:
    """A run by itself over its steps; several at their last."""
    if len(runs) == 1:
        steps = runs[0].samples
        chosen = [(sample.name, "", sample.path) for sample in (steps[i] for i in spread(range(len(steps)), 4))]
    else:
        chosen = [(run.label, run.samples[-1].name, run.samples[-1].path) for run in runs if run.samples]
    pictures = [album.embed(path, label, detail) for label, detail, path in chosen]
    shown = [picture for picture in pictures if picture is not None]
    if not shown:
        return [Text(["No samples yet: scalelong sample RUN draws some."], "empty")]
    note = "All grids are drawn from the same noise by the EMA weights, so images in the same place can be compared."
    return [Gallery("Drawn images", shown, note)]


def setup(runs: Sequence[RunFolder]) -> list[Block]:
    first = runs[0]
    blocks: list[Block] = [run_facts(first), environment_facts(first.starts[-1] if first.starts else {})]
    return [*blocks, *commands(runs), settings_table(runs)]


def commands(runs: Sequence[RunFolder]) -> list[Block]:
    made = [(run.label, shell_command(run.starts[0])) for run in runs if run.starts]
    return [Command(f"To run {label} again", text) for label, text in made if text]
