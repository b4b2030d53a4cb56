"""What the page says about a comparison: one series per method, one view per setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from . import edges, sections
from .blocks import Block, Chart, Interval, Intervals, Metadata, Part, Section, Series, Table, Text, View
from .comparison import Arm, Comparison, Curve
from .numbers import NOTHING, TO, Estimate, duration, listed, plural, show, show_estimate, show_factor, thin
from .runs import Environment
from .transfer import transfers

MOST_GALLERIES = 6

SPEEDUP = (
    "its steps over those of the method. 1 = no faster, and an interval that holds 1 shows no difference. "
    "95 % intervals over pairs of runs with the same seed."
)
OVER_SEEDS = "EMA weights. Shaded: 95 % interval of the mean over seeds."
EVERY_RUN = "One line per run: the mean loss of the steps since the last point."
DIFFERENCES = "Below 0 the method is lower. p is of a paired test; it is not corrected for the number of rows."
OSCILLATION = "Mean over blocks, skips and seeds; 0 = does not move, 1 = jumps between 1 and 3 (Fig. 1)."
NOISE = "The error of the trained network when its inputs get extra noise; lower and flatter is better (Fig. 3c)."
COEFFICIENTS = "At the end of training; for learned methods the mean over seeds and its 95 % interval."
NO_PAIRS = "No comparison could be made yet: it takes finished runs of the baseline and of a method."


def comparison_part(comparison: Comparison, album: sections.Album) -> Part:
    results, missing = comparison.results, []
    # What a search for the edge is about comes first.
    edge = Section("edge", "Edge of stability", edges.edges(comparison, album, missing))
    moved = Section("stability", "Oscillation", oscillation(comparison))
    first = [edge, moved] if results.edge_rates else []
    found = transfers(results.transfer or ())
    shown = [
        Section("transfer", "Best rate by width", found),
        *first,
        Section("result", "Result", result(comparison)),
        Section("curves", "Curves", curves(comparison)),
        *([] if first else [moved]),
        Section("coefficients", "Coefficients of the skips", coefficients(comparison)),
        Section("noise", "Robustness to extra noise", noise(comparison)),
        *([] if first else [edge]),
        Section("rates", "Sensitivity to the learning rate", [] if found else edges.rates(comparison)),
        Section("samples", "Samples", samples(comparison, album, missing)),
        Section("kappa", "Which κ", advice(comparison)),
        Section("setup", "What was run", setup(comparison)),
    ]
    shown = [section for section in shown if section.blocks]
    of_runs = [f"{run.label}: {warning}" for _, run in comparison.begun for warning in run.warnings]
    warnings = [*results.warnings, *comparison.warnings, *missing, *of_runs]
    shown.insert(1, sections.warnings_section(unusual_events(comparison), warnings))
    labels = listed(list(dict.fromkeys(arm.label for arm in comparison.arms)))
    settings = comparison.settings
    subtitle = [
        f"{plural(len(comparison.seeds), 'seed')} per method" if comparison.seeds else "",
        plural(results.steps, "step") if results.steps else "",
        plural(len(settings), "setting") if len(settings) > 1 else "".join(settings),
    ]
    title = f"{results.recipe}: {labels}" if labels else results.recipe
    return Part(title, ", ".join(filter(None, subtitle)), *status(comparison), shown)


def status(comparison: Comparison) -> tuple[str, str]:
    """What the badge says, and the state of the part."""
    done, total = comparison.results.runs_done, comparison.results.runs_total
    states = [one.result.status for one in comparison.runs]
    counts = [(states.count(state), state) for state in ("failed", "broken")]
    lost, bad = sum(count for count, _ in counts), "".join(f", {count} {state}" for count, state in counts if count)
    if comparison.running:
        return f"unfinished: {done} of {total} runs done{bad}", "running"
    return f"finished: {done if lost else total} runs{bad}", "trouble" if lost else "finished"


def unusual_events(comparison: Comparison) -> list[tuple[str, str]]:
    """What happened in each run; one that failed early may have no folder."""
    found = []
    for one in comparison.runs:
        status, message = one.result.status, one.result.message
        lines = one.run.event_lines() if one.run else []
        # A run that the guard gave up has said so in its own events.
        if not (status == "failed" and any(line.startswith("Training diverged") for line in lines)):
            reason = ": ".join(filter(None, (status, one.result.cause, message)))
            failure = [reason] * (status in ("failed", "broken") or message is not None)
            lines = [*failure, *lines]
        found += [(f"{comparison.name_of(one.arm)}, {one.name}", line) for line in lines]
    return found


def result(comparison: Comparison) -> Sequence[Block]:
    pairs = comparison.results.comparisons
    blocks: list[Block] = []
    if comparison.running:
        blocks.append(Text("Please note", "warning", ["Not all runs have ended: intervals will change."]))
    if not pairs and comparison.results.transfer is None:
        blocks.append(Text(NO_PAIRS, "empty"))
    settings = list(dict.fromkeys(pair.setting for pair in pairs))
    for place, setting in enumerate(settings):
        plot = speedups(f"speedup-{place}", setting, comparison)
        # Said once is enough where there are many settings.
        blocks.append(replace(plot, half=len(settings) > 1, note=plot.note if place == 0 else ""))
    return [*blocks, numbers_table(comparison), *difference_table(comparison)]


def speedups(key: str, setting: str, comparison: Comparison) -> Intervals:
    """How many times fewer steps a method took, and the sentences of the comparison as they were written."""
    pairs = [pair for pair in comparison.results.comparisons if pair.setting == setting]
    rows = []
    for pair in pairs:
        arm, found = comparison.arm(pair.arm), pair.speedup_steps
        said = list(dict.fromkeys(filter(None, (pair.sentence, pair.sentence_seconds))))
        rows.append(Interval(arm.label, arm.style, found, show_factor(found), said, pair.verdict))
    note = f"To the final quality of {comparison.arm(pairs[0].baseline).label}: {SPEEDUP}"
    name = comparison.setting_name(setting)
    title = f"Speed-up, {name}" if name else "Speed-up to the baseline's final quality"
    return Intervals(title, "times fewer steps", rows, reference=1.0, log=True, key=key, note=note)


def numbers_table(comparison: Comparison) -> Table:
    fd = [comparison.fd_name] * any(arm.fd_curve for arm in comparison.arms)
    rows = []
    for arm in comparison.arms:
        done = f"{sum(run.status == 'finished' for run in arm.runs)} of {len(arm.runs)}"
        paces = [run.seconds_per_step for run in arm.runs if run.seconds_per_step is not None]
        pace = show(sum(paces) / len(paces), 3) if paces else NOTHING
        figures = [show_estimate(arm.final_loss), *[show_estimate(arm.final_fd) for _ in fd]]
        parameters = show(comparison.results.parameters.get(arm.id))
        rows.append([comparison.name_of(arm), done, failed(arm), *figures, pace, parameters])
    columns = ["method", "finished", "failed", "validation loss at the end", *fd, "seconds per step", "parameters"]
    note = (
        "Mean over seeds and its 95 % interval. Failed: not finite, given up, or nothing learned; share with interval."
    )
    return Table("The numbers", columns, rows, note=note)


def failed(arm: Arm) -> str:
    found = arm.failed
    if found is None or not found.of:
        return NOTHING
    share = "" if found.low is None or found.high is None else f" ({found.low:.0%}{TO}{found.high:.0%})"
    return f"{found.count} of {found.of}{share}"


def difference_table(comparison: Comparison) -> Sequence[Block]:
    """The paired differences at the end of training."""
    rows = []
    for pair in comparison.results.comparisons:
        label = f"{comparison.arm(pair.arm).label} − {comparison.arm(pair.baseline).label}"
        names = ("validation loss", comparison.fd_name, "oscillation")
        for name, found in zip(names, (pair.final_loss, pair.final_fd, pair.oscillation), strict=True):
            if found is not None and found.value is not None:
                rows.append((label, pair.setting, name, show_estimate(found, 3), show(found.p, 2)))
    columns = ("pair", "setting", "what", "difference (95 % interval)", "p")
    return [Table("Paired differences at the end", columns, rows, note=DIFFERENCES, folded=True)] if rows else []


def by_setting(comparison: Comparison, make: Callable[[Arm], Series]) -> list[View]:
    """One view per setting, with the arms that have something to show."""
    views = []
    for setting in comparison.settings:
        series = [one for arm in comparison.arms if arm.setting == setting and (one := make(arm)).values]
        views += [View(comparison.setting_name(setting), series)] if series else []
    return views


def curves(comparison: Comparison) -> Sequence[Block]:
    ended = {arm.id: "failed" for arm in comparison.arms if arm.failed and arm.failed.count}
    losses = by_setting(comparison, lambda arm: curve_series(arm, arm.loss_curve, ended.get(arm.id, "")))
    fds = by_setting(comparison, lambda arm: curve_series(arm, arm.fd_curve, ended.get(arm.id, "")))
    training = by_setting(comparison, lambda arm: training_series(comparison, arm))
    title, y, log = "Training loss of every run", "training loss", "runs/*/*/metrics.jsonl"
    fd, lower = comparison.fd_name, f"Lower is better. {OVER_SEEDS}"
    charts = [
        Chart("Validation loss", "step", "validation loss", losses, "curves.csv", key="validation", note=OVER_SEEDS),
        Chart(f"{fd} of samples", "step", fd, fds, "curves.csv", key="fd", note=lower, half=True),
        Chart(title, "step", y, training, log, key="train", note=EVERY_RUN, half=True),
    ]
    return [chart for chart in charts if chart.values] or [Text("No run has numbers yet.", "empty")]


def curve_series(arm: Arm, curve: Curve | None, ended: str = "") -> Series:
    """A curve of results.json with its band and its runs."""
    if curve is None:
        return Series(arm.label, arm.style)
    runs = zip(arm.runs, curve.runs, strict=False)
    members = [(f"seed {run.seed}", replace(curve, mean=values).points) for run, values in runs]
    # As long as a seed is missing there is no mean, and the runs stand for themselves.
    points = curve.points if any(y is not None for y in curve.mean) else []
    return Series(arm.label, arm.style, points, curve.band, members, ended)


def training_series(comparison: Comparison, arm: Arm) -> Series:
    """Every run by itself as its metrics.jsonl has it, so that a running comparison can be watched."""
    most = max(40, min(200, 12_000 // max(1, len(comparison.begun))))
    runs = [(one, run) for one, run in comparison.begun if one.arm is arm]
    lines = [(one.name, thin(run.series("loss"), most)) for one, run in runs]
    ended = "failed" if any(run.ended for _, run in runs) else ""
    return Series(arm.label, arm.style, members=lines, ended=ended)


def oscillation(comparison: Comparison) -> Sequence[Block]:
    charts, means, y = [], [], "oscillation index"
    for kind in ("feature", "gradient"):
        title, note = f"Oscillation of {kind}s", "Mean over seeds and its 95 % interval."
        views = by_setting(comparison, lambda arm, kind=kind: oscillation_series(arm, kind))
        charts.append(Chart(title, "step", y, views, "results.json", key=f"osc-{kind}", note=OSCILLATION, half=True))
        found = [(arm, arm.oscillation.get(kind) if arm.oscillation else None) for arm in comparison.arms]
        rows = [interval(comparison.name_of(arm), arm.style, estimate) for arm, estimate in found]
        means.append(Intervals(f"{title} over the whole run", y, rows, key=f"osc-mean-{kind}", note=note, half=True))
    nothing = "Not measured yet." if comparison.running else "The skips were not watched in these runs."
    return [one for one in (*charts, *means) if one.values] or [Text(nothing, "empty")]


def oscillation_series(arm: Arm, kind: str) -> Series:
    found = arm.oscillation_curve
    points = list(zip(found.steps, getattr(found, kind), strict=False)) if found else []
    return Series(arm.label, arm.style, thin(points, 300))


def interval(label: str, style: int, estimate: Estimate | None, details: Sequence[str] = ()) -> Interval:
    return Interval(label, style, estimate or Estimate(), show_estimate(estimate, 3), details)


def coefficients(comparison: Comparison) -> Sequence[Block]:
    views = by_setting(comparison, lambda arm: curve_series(arm, arm.coefficients))
    return [sections.coefficient_chart(views, comparison.kappa, COEFFICIENTS, "results.json")] if views else []


def noise(comparison: Comparison) -> Sequence[Block]:
    views = by_setting(comparison, lambda arm: curve_series(arm, arm.noise_robustness))
    title, x = "Error under extra noise", "standard deviation of the extra noise"
    return [Chart(title, x, "error", views, "results.json", key="noise-error", note=NOISE)] if views else []


def samples(comparison: Comparison, album: sections.Album, warnings: list[str]) -> Sequence[Block]:
    """A gallery for each of the first settings, and which others there are."""
    shown, others = comparison.settings[:MOST_GALLERIES], comparison.settings[MOST_GALLERIES:]
    galleries = [block for setting in shown for block in setting_gallery(comparison, album, setting, warnings)]
    if not galleries:
        return [Text("No samples yet.", "empty")]
    names = "; ".join(map(comparison.setting_name, others))
    text = f"Not shown, to keep the page small: the samples of {names}, which lie in their folders."
    return [*galleries, *[Text(text, "note")] * bool(others)]


def setting_gallery(
    comparison: Comparison, album: sections.Album, setting: str, warnings: list[str]
) -> Sequence[Block]:
    """The same seed for all methods, one picture for each; nothing where there are no pictures."""
    here = [(one, grids[-1]) for one, run in comparison.begun if one.arm.setting == setting and (grids := run.samples)]
    # The seed for which most methods have samples; the smallest of those.
    seeds = [one.result.seed for one, _ in here]
    seed = min(set(seeds), key=lambda seed: (-seeds.count(seed), seed is None, seed or 0), default=None)
    grids = [(path, one.arm.label, step) for one, (step, path) in here if one.result.seed == seed]
    note = f"Seed {show(seed)} for all: the same initial noise, so images in the same place can be compared."
    name = comparison.setting_name(setting)
    made = album.gallery(f"Samples, {name}" if name else "Samples", note, grids, warnings)
    return [replace(block, half=len(block.pictures) <= 2) for block in made]


def advice(comparison: Comparison) -> Sequence[Block]:
    """The comparison's own, or that of one of its runs."""
    runs = [run for _, run in comparison.begun]
    kappa = comparison.kappa or next((run.kappa for run in runs if run.kappa), None)
    if kappa is None and not runs:
        return []
    return sections.advice_blocks(kappa, runs[0].folder if runs else comparison.folder, comparison.folder)


def setup(comparison: Comparison) -> Sequence[Block]:
    results, first = comparison.results, next((run for _, run in comparison.begun), None)
    blocks: list[Block] = [Text("To do it again", "command", [results.command])] if results.command else []
    seconds = [one.result.seconds for one in comparison.runs if one.result.seconds is not None]
    rows = [
        ("recipe", results.recipe),
        ("description", results.description or NOTHING),
        ("seeds", ", ".join(map(str, comparison.seeds)) or NOTHING),
        ("steps", show(results.steps)),
        ("baseline", results.baseline),
        ("created", sections.moment(results.created)),
        ("updated", sections.moment(results.updated)),
        ("time of all runs", duration(sum(seconds)) if seconds else NOTHING),
    ]
    blocks.append(Metadata("The comparison", rows))
    blocks += [sections.run_metadata(first, f"Its first run: {first.label}")] if first else []
    # That of the comparison, and of its first run where it says nothing.
    start = asdict(first.starts[0]) if first and first.starts else {}
    own = {key: value for key, value in asdict(results.environment).items() if value}
    blocks += [sections.environment_metadata(Environment(**(start | own))), runs_table(comparison)]
    return [*blocks, *([sections.settings_table([first])] if first else [])]


def runs_table(comparison: Comparison) -> Table:
    columns = ("run", "setting", "status", "step", "time", "final validation loss", f"final {comparison.fd_name}")
    rows = []
    for one in comparison.runs:
        found, setting = one.result, one.arm.setting or NOTHING
        state = f"{found.status}: {found.cause}" if found.cause else found.status
        numbers = (show(found.step), duration(found.seconds), show(found.final_loss), show(found.final_fd))
        rows.append((f"{one.arm.label}, {one.name}", setting, state, *numbers))
    return Table("Every run", columns, rows, folded=True)
