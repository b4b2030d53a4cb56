"""What the page says about a comparison: one series per method, one view per setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from . import shared
from .blocks import Block, Chart, Command, Interval, Intervals, Metadata, Part, Section, Series, Table, Text, View
from .comparison import Arm, Comparison, Curve, Pair, Sweep
from .numbers import NOTHING, TO, duration, listed, plural, show, show_estimate, show_factor, thin
from .pictures import Album
from .read import Environment, Estimate

MOST_GALLERIES = 6

OVER_SEEDS = "EMA weights. Shaded: 95 % interval of the mean over seeds."
EVERY_RUN = "One line per run: the mean loss of the steps since the last point."
OSCILLATION = "Mean over blocks, skips and seeds; 0 = does not move, 1 = jumps between 1 and 3 (Fig. 1)."
NOISE = "The error of the trained network when its inputs get extra noise; lower and flatter is better (Fig. 3c)."
COEFFICIENTS = "At the end of training; for learned methods the mean over seeds and its 95 % interval."
RATES = "Validation loss at the end for each learning rate; a flat curve forgives a bad choice. Shaded: 95 % interval."
SENSITIVITY = "Expected excess loss over the range of rates (Wortsman et al. 2023): lower is less sensitive."


def comparison_part(comparison: Comparison, album: Album) -> Part:
    """All about one comparison."""
    results, pictures = comparison.results, []
    sections = [
        Section("result", "Result", result(comparison)),
        Section("curves", "Curves", curves(comparison)),
        Section("stability", "Oscillation", oscillation(comparison)),
        Section("coefficients", "Coefficients of the skips", coefficients(comparison)),
        Section("noise", "Robustness to extra noise", noise(comparison)),
        Section("rates", "Sensitivity to the learning rate", rates(comparison)),
        Section("samples", "Samples", samples(comparison, album, pictures)),
        Section("kappa", "Which κ", advice(comparison)),
        Section("setup", "What was run", setup(comparison)),
    ]
    sections = [section for section in sections if section.blocks]
    of_runs = [f"{run.label}: {warning}" for _, run in comparison.begun for warning in run.warnings]
    warnings = [*results.warnings, *comparison.warnings, *pictures, *of_runs]
    sections.insert(1, shared.warnings_section(unusual_events(comparison), warnings))
    labels = listed(list(dict.fromkeys(arm.label for arm in comparison.arms)))
    title = f"{comparison.recipe}: {labels}" if labels else comparison.recipe
    settings = comparison.settings
    subtitle = [
        plural(len(comparison.seeds), "seed") + " per method" if comparison.seeds else "",
        plural(results.steps, "step") if results.steps else "",
        plural(len(settings), "setting") if len(settings) > 1 else "".join(settings),
    ]
    return Part(title, ", ".join(part for part in subtitle if part), *status(comparison), sections)


def status(comparison: Comparison) -> tuple[str, str]:
    """What the badge says, and how it looks."""
    done, total = comparison.results.runs_done, comparison.results.runs_total
    lost = comparison.count("diverged", "failed")
    bad = f", {lost} diverged or failed" if lost else ""
    if comparison.running:
        return f"unfinished: {done} of {total} runs done{bad}", "running"
    return f"finished: {done if lost else total} runs{bad}", "trouble" if lost else "finished"


def unusual_events(comparison: Comparison) -> list[tuple[str, str]]:
    """What happened in each run; one that failed early may have no folder."""
    found = []
    for one in comparison.runs:
        status, message = one.result.status, one.result.message
        lines = one.run.event_lines() if one.run else []
        # A run that diverged has said so in its own events.
        if not (status == "diverged" and any(line.startswith("Training diverged") for line in lines)):
            failure = [f"{status}: {message}"] if message else [status] * (status in ("failed", "diverged"))
            lines = [*failure, *lines]
        found += [(f"{comparison.name_of(one.arm)}, {one.name}", line) for line in lines]
    return found


# Result


def result(comparison: Comparison) -> list[Block]:
    pairs, blocks = comparison.results.comparisons, []
    if comparison.running:
        blocks.append(Text(["Not all runs have ended: intervals will change."], "warning"))
    if not pairs:
        nothing = "No comparison could be made yet: it takes finished runs of the baseline and of a method."
        blocks.append(Text([nothing], "empty"))
    settings = list(dict.fromkeys(pair.setting for pair in pairs))
    for place, setting in enumerate(settings):
        plot = speedups(f"speedup-{place}", setting, comparison)
        # Said once is enough where there are many settings.
        blocks.append(replace(plot, half=len(settings) > 1, note=plot.note if place == 0 else ""))
    return [*blocks, numbers_table(comparison), *difference_table(comparison)]


def speedups(key: str, setting: str, comparison: Comparison) -> Intervals:
    """How many times fewer steps a method took, and the sentences of the comparison as they were written."""
    pairs = [pair for pair in comparison.results.comparisons if pair.setting == setting]
    rows = [speedup_row(pair, comparison) for pair in pairs]
    note = (
        f"To the final quality of {comparison.label_of(pairs[0].baseline)}: its steps over those of the method. 1 = no "
        "faster, and an interval that holds 1 shows no difference. 95 % intervals over pairs of runs with the same "
        "seed."
    )
    name = comparison.setting_name(setting)
    title = f"Speed-up, {name}" if name else "Speed-up to the baseline's final quality"
    return Intervals(key, title, "times fewer steps", rows, note, reference=1.0, log=True)


def speedup_row(pair: Pair, comparison: Comparison) -> Interval:
    found = pair.speedup_steps
    text = f"{found.bound or ''} {show_factor(found)}".strip() if found.value is not None else "not measured"
    said = list(dict.fromkeys(sentence for sentence in (pair.sentence, pair.sentence_seconds) if sentence))
    style = next((arm.style for arm in comparison.arms if arm.id == pair.arm), 0)
    return Interval(comparison.label_of(pair.arm), style, found, text, said, pair.verdict)


def numbers_table(comparison: Comparison) -> Table:
    has_fd = any(arm.fd_curve for arm in comparison.arms)
    columns = ["method", "finished", "diverged", "validation loss at the end", *[comparison.fd_name] * has_fd]
    rows = []
    for arm in comparison.arms:
        done = f"{sum(run.status == 'finished' for run in arm.runs)} of {len(arm.runs)}"
        paces = [run.seconds_per_step for run in arm.runs if run.seconds_per_step is not None]
        pace = show(sum(paces) / len(paces), 3) if paces else NOTHING
        figures = [show_estimate(arm.final_loss), *[show_estimate(arm.final_fd)] * has_fd]
        parameters = show(comparison.results.parameters.get(arm.id))
        rows.append([comparison.name_of(arm), done, diverged(arm), *figures, pace, parameters])
    note = "Mean over seeds and its 95 % interval; diverged: share with its 95 % interval."
    return Table("The numbers", [*columns, "seconds per step", "parameters"], rows, note)


def diverged(arm: Arm) -> str:
    found = arm.diverged
    if found is None or not found.of:
        return NOTHING
    share = "" if found.low is None or found.high is None else f" ({found.low:.0%}{TO}{found.high:.0%})"
    return f"{found.count} of {found.of}{share}"


def difference_table(comparison: Comparison) -> list[Block]:
    """The paired differences at the end of training."""
    rows = []
    for pair in comparison.results.comparisons:
        label = f"{comparison.label_of(pair.arm)} − {comparison.label_of(pair.baseline)}"
        names = ("validation loss", comparison.fd_name, "oscillation")
        for name, found in zip(names, (pair.final_loss, pair.final_fd, pair.oscillation), strict=True):
            if found is not None and found.value is not None:
                rows.append((label, pair.setting, name, show_estimate(found, 3), show(found.p, 2)))
    note = "Below 0 the method is lower. p is of a paired test; it is not corrected for the number of rows."
    columns = ("pair", "setting", "what", "difference (95 % interval)", "p")
    return [Table("Paired differences at the end", columns, rows, note, folded=True)] if rows else []


# Charts


def by_setting(comparison: Comparison, make: Callable[[Arm], Series]) -> list[View]:
    """One view per setting, with the arms that have something to show."""
    views = []
    for setting in comparison.settings:
        series = [make(arm) for arm in comparison.arms if arm.setting == setting]
        known = [one for one in series if not one.empty]
        views += [View(comparison.setting_name(setting), known)] if known else []
    return views


def mean_series(arm: Arm, curve: Curve | None) -> Series:
    """A mean with its band."""
    return Series(arm.label, arm.style, curve.points, curve.band) if curve else Series(arm.label, arm.style)


def curves(comparison: Comparison) -> list[Block]:
    losses = by_setting(comparison, lambda arm: curve_series(arm, arm.loss_curve))
    fds = by_setting(comparison, lambda arm: curve_series(arm, arm.fd_curve))
    training = by_setting(comparison, lambda arm: training_series(comparison, arm))
    name, lower, log = comparison.fd_name, f"Lower is better. {OVER_SEEDS}", "runs/*/*/metrics.jsonl"
    title, y = "Training loss of every run", "training loss"
    charts = [
        Chart("validation", "Validation loss", "step", "validation loss", losses, OVER_SEEDS, "curves.csv"),
        Chart("fd", f"{name} of samples", "step", name, fds, lower, "curves.csv", half=True),
        Chart("train", title, "step", y, training, EVERY_RUN, log, half=True),
    ]
    shown = [chart for chart in charts if not chart.empty]
    return [*shown] or [Text(["No run has numbers yet."], "empty")]


def curve_series(arm: Arm, curve: Curve | None) -> Series:
    """A curve of results.json with its band and its runs."""
    if curve is None:
        return Series(arm.label, arm.style)
    members = [
        (f"seed {run.seed}", replace(curve, mean=values).points)
        for run, values in zip(arm.runs, curve.runs, strict=False)
    ]
    # As long as a seed is missing there is no mean, and the runs stand for themselves.
    points = curve.points if any(y is not None for y in curve.mean) else []
    ended = "diverged" if arm.diverged and arm.diverged.count else ""
    return Series(arm.label, arm.style, points, curve.band, members, ended)


def training_series(comparison: Comparison, arm: Arm) -> Series:
    """Every run by itself as its metrics.jsonl has it, so that a running comparison can be watched."""
    most = max(40, min(200, 12_000 // max(1, len(comparison.begun))))
    runs = [(one, run) for one, run in comparison.begun if one.arm is arm]
    lines = [(one.name, thin(run.series("loss"), most)) for one, run in runs]
    ended = "diverged" if any(run.ended for _, run in runs) else ""
    return Series(arm.label, arm.style, members=lines, ended=ended)


def oscillation(comparison: Comparison) -> list[Block]:
    charts, means = [], []
    for kind in ("feature", "gradient"):
        title, y = f"Oscillation of {kind}s", "oscillation index"
        views = by_setting(comparison, lambda arm, kind=kind: oscillation_series(arm, kind))
        charts.append(Chart(f"osc-{kind}", title, "step", y, views, OSCILLATION, "results.json", half=True))
        rows = []
        for arm in comparison.arms:
            estimate = arm.oscillation.get(kind) if arm.oscillation else None
            rows.append(interval(comparison.name_of(arm), arm.style, estimate))
        title, note = f"{title} over the whole run", "Mean over seeds and its 95 % interval."
        means.append(Intervals(f"osc-mean-{kind}", title, y, rows, note, half=True))
    shown = [one for one in (*charts, *means) if not one.empty]
    nothing = "Not measured yet." if comparison.running else "The skips were not watched in these runs."
    return [*shown] or [Text([nothing], "empty")]


def oscillation_series(arm: Arm, kind: str) -> Series:
    found = arm.oscillation_curve
    points = list(zip(found.steps, getattr(found, kind), strict=False)) if found else []
    return Series(arm.label, arm.style, thin(points, 300))


def interval(label: str, style: int, estimate: Estimate | None, details: Sequence[str] = ()) -> Interval:
    return Interval(label, style, estimate or Estimate(), show_estimate(estimate, 3), details)


def coefficients(comparison: Comparison) -> list[Block]:
    views = by_setting(comparison, lambda arm: mean_series(arm, arm.coefficients))
    return [shared.coefficient_chart(views, comparison.kappa, COEFFICIENTS, "results.json")] if views else []


def noise(comparison: Comparison) -> list[Block]:
    views = by_setting(comparison, lambda arm: mean_series(arm, arm.noise_robustness))
    title, x = "Error under extra noise", "standard deviation of the extra noise"
    return [Chart("noise-error", title, x, "error", views, NOISE, "results.json")] if views else []


def rates(comparison: Comparison) -> list[Block]:
    """The final losses by learning rate: one view per depth and batch size."""
    views: dict[str, list[tuple[Series, Sweep]]] = {}
    for sweep in comparison.results.rate_sensitivity:
        style = next((arm.style for arm in comparison.arms if arm.label == sweep.label), 0)
        ended = "some diverged" if None in sweep.mean else ""
        series = Series(sweep.label, style, sweep.points, sweep.band, ended=ended)
        views.setdefault(f"depth {show(sweep.depth)}, batch {show(sweep.batch)}", []).append((series, sweep))
    if not views:
        return []
    rows = [
        interval(
            f"{series.name}, {name}" if len(views) > 1 else series.name,
            series.style,
            sweep.sensitivity,
            [f"Largest stable rate: {show(sweep.largest_stable_rate)}"],
        )
        for name, found in views.items()
        for series, sweep in found
    ]
    drawn = [View(name, [series for series, _ in found]) for name, found in views.items()]
    title, x, y = "Final loss by learning rate", "learning rate", "validation loss"
    return [
        Chart("rate-loss", title, x, y, drawn, RATES, "results.json", log_x=True),
        Intervals("sensitivity", "Learning-rate sensitivity", "sensitivity", rows, SENSITIVITY),
    ]


# Samples and settings


def samples(comparison: Comparison, album: Album, warnings: list[str]) -> list[Block]:
    """A gallery for each of the first settings, and which others there are."""
    shown, others = comparison.settings[:MOST_GALLERIES], comparison.settings[MOST_GALLERIES:]
    galleries = [block for setting in shown for block in setting_gallery(comparison, album, setting, warnings)]
    if galleries and others:
        names = "; ".join(comparison.setting_name(setting) for setting in others)
        text = f"Not shown, to keep the page small: the samples of {names}, which lie in their folders."
        return [*galleries, Text([text], "note")]
    return galleries or [Text(["No samples yet."], "empty")]


def setting_gallery(comparison: Comparison, album: Album, setting: str, warnings: list[str]) -> list[Block]:
    """The same seed for all methods, one picture for each; nothing where there are no pictures."""
    here = [(one, grids[-1]) for one, run in comparison.begun if one.arm.setting == setting and (grids := run.samples)]
    # The seed for which most methods have samples; the smallest of those.
    seeds = [one.result.seed for one, _ in here]
    seed = min(set(seeds), key=lambda seed: (-seeds.count(seed), seed is None, seed or 0), default=None)
    grids = [(path, one.arm.label, step) for one, (step, path) in here if one.result.seed == seed]
    note = f"Seed {show(seed)} for all: the same initial noise, so images in the same place can be compared."
    name = comparison.setting_name(setting)
    title = f"Samples, {name}" if name else "Samples"
    made = shared.gallery(title, grids, note, album, warnings)
    return [replace(block, half=len(block.pictures) <= 2) for block in made]


def advice(comparison: Comparison) -> list[Block]:
    """The comparison's own, or that of one of its runs."""
    runs = [run for _, run in comparison.begun]
    kappa = comparison.kappa or next((run.kappa for run in runs if run.kappa), None)
    if kappa is None and not runs:
        return []
    return shared.advice_blocks(kappa, runs[0].folder if runs else comparison.folder, comparison.folder)


def setup(comparison: Comparison) -> list[Block]:
    results, first = comparison.results, next((run for _, run in comparison.begun), None)
    blocks: list[Block] = [Command("To do it again", results.command)] if results.command else []
    seconds = [one.result.seconds for one in comparison.runs if one.result.seconds is not None]
    rows = [
        ("recipe", comparison.recipe),
        ("description", results.description or NOTHING),
        ("seeds", ", ".join(map(str, comparison.seeds)) or NOTHING),
        ("steps", show(results.steps)),
        ("baseline", results.baseline),
        ("created", shared.moment(results.created)),
        ("updated", shared.moment(results.updated)),
        ("time of all runs", duration(sum(seconds)) if seconds else NOTHING),
    ]
    blocks.append(Metadata("The comparison", rows))
    blocks += [shared.run_metadata(first, f"Its first run: {first.label}")] if first else []
    # That of the comparison, and of its first run where it says nothing.
    start = asdict(first.starts[0]) if first and first.starts else {}
    own = {key: value for key, value in asdict(results.environment).items() if value}
    blocks += [shared.environment_metadata(Environment(**(start | own))), runs_table(comparison)]
    return [*blocks, *([shared.settings_table([first])] if first else [])]


def runs_table(comparison: Comparison) -> Table:
    columns = ("run", "setting", "status", "step", "time", "final validation loss", f"final {comparison.fd_name}")
    rows = []
    for one in comparison.runs:
        found, setting = one.result, one.arm.setting or NOTHING
        numbers = (show(found.step), duration(found.seconds), show(found.final_loss), show(found.final_fd))
        rows.append((one.label, setting, found.status, *numbers))
    return Table("Every run", columns, rows, folded=True)
