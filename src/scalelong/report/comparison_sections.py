"""What the page says about a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .blocks import Block, Interval, Intervals, Part, Section, Table, Text
from .common import warnings_section
from .comparison import Arm, ArmRun, Comparison, Folders, run_folders
from .comparison_charts import coefficients, curves, noise, oscillation, rates
from .comparison_setup import advice, samples, setup
from .numbers import NOTHING, TO, listed, plural, show, show_estimate, show_factor
from .pictures import Album
from .read import Estimate, as_dict, as_dicts, as_list, as_text, finite, whole
from .runs import event_lines


def comparison_part(key: str, comparison: Comparison, album: Album) -> Part:
    """All about one comparison."""
    folders = run_folders(comparison)
    sections = [
        Section(f"{key}-result", "Result", headline(key, comparison)),
        Section(f"{key}-curves", "Curves", curves(key, comparison, folders)),
        Section(f"{key}-stability", "Oscillation", oscillation(key, comparison)),
        Section(f"{key}-coefficients", "Coefficients of the skips", coefficients(key, comparison)),
        Section(f"{key}-noise", "Robustness to extra noise", noise(key, comparison)),
        Section(f"{key}-rates", "Sensitivity to the learning rate", rates(key, comparison)),
        Section(f"{key}-samples", "Samples", samples(comparison, folders, album)),
        Section(f"{key}-kappa", "Which κ", advice(comparison, folders)),
        Section(f"{key}-setup", "What was run", setup(comparison, folders)),
    ]
    sections = [section for section in sections if section.blocks]
    unusual = unusual_runs(comparison, folders)
    said = [as_text(line) for line in as_list(comparison.content.get("warnings"))]
    noted = [f"{folder.label}: {note}" for _, _, folder in folders for note in folder.notes]
    sections.insert(1, warnings_section(key, unusual, [*said, *comparison.notes, *album.notes.lines, *noted]))
    return Part(key, title(comparison), subtitle(comparison), *status(comparison), sections)


def unusual_runs(comparison: Comparison, folders: Folders) -> list[tuple[str, list[str]]]:
    """For each run what happened in it; one that failed early may have no folder."""
    events = {(arm.key, run.name): event_lines(folder) for arm, run, folder in folders}
    found = []
    for arm in comparison.arms:
        for run in arm.runs:
            lines = events.get((arm.key, run.name), [])
            # A run that diverged has said so in its own events.
            told = run.status == "diverged" and any(line.startswith("Training diverged") for line in lines)
            found.append((f"{comparison.name_of(arm)}, {run.short_name}", lines if told else [*failure(run), *lines]))
    return found


def title(comparison: Comparison) -> str:
    labels = list(dict.fromkeys(arm.label for arm in comparison.arms))
    return f"{comparison.recipe}: {listed(labels)}" if labels else comparison.recipe


def subtitle(comparison: Comparison) -> str:
    parts = [
        plural(len(comparison.seeds), "seed") + " per method" if comparison.seeds else "",
        plural(steps, "step") if (steps := whole(comparison.content.get("steps"))) else "",
        plural(len(comparison.settings), "setting") if len(comparison.settings) > 1 else "".join(comparison.settings),
    ]
    return ", ".join(part for part in parts if part)


def status(comparison: Comparison) -> tuple[str, str]:
    """What the badge says, and how it looks."""
    total = whole(comparison.content.get("runs_total")) or sum(len(arm.runs) for arm in comparison.arms)
    done = whole(comparison.content.get("runs_done"))
    done = comparison.count("finished") + comparison.count("diverged") if done is None else done
    lost = comparison.count("diverged") + comparison.count("failed")
    bad = f", {lost} diverged or failed" if lost else ""
    if comparison.running:
        return f"unfinished: {done} of {total} runs done{bad}", "running"
    return f"finished: {done if lost else total} runs{bad}", "trouble" if lost else "finished"


def failure(run: ArmRun) -> list[str]:
    message = as_text(run.content.get("message"))
    return [f"{run.status}: {message}"] if message else [run.status] if run.status in ("failed", "diverged") else []


# Result


def headline(key: str, comparison: Comparison) -> list[Block]:
    found = as_dicts(comparison.content.get("comparisons"))
    blocks: list[Block] = []
    if comparison.running:
        blocks.append(Text(["Not all runs have ended: intervals will change."], "warning"))
    settings = list(dict.fromkeys(as_text(one.get("setting")) for one in found))
    for place, setting in enumerate(settings):
        here = [one for one in found if as_text(one.get("setting")) == setting]
        plot = speedups(f"{key}-speedup-{place}", comparison.setting_name(setting), here, comparison)
        # Said once is enough where there are many settings.
        blocks.append(replace(plot, half=len(settings) > 1, note=plot.note if place == 0 else ""))
    nothing = "No comparison could be made yet: it takes finished runs of the baseline and of a method."
    blocks += [] if found else [Text([nothing], "empty")]
    return [*blocks, numbers_table(comparison), *difference_table(comparison)]


def speedups(key: str, setting: str, found: Sequence[dict[str, Any]], comparison: Comparison) -> Intervals:
    """How many times fewer steps a method took, and the sentences of the comparison as they were written."""
    rows = [speedup_row(one, comparison) for one in found]
    base = comparison.arm(as_text(found[0].get("baseline"))) if found else None
    name = base.label if base else comparison.baseline
    note = (
        f"To the final quality of {name}: its steps over those of the method. 1 = no faster, and an interval that "
        "holds 1 shows no difference. 95 % intervals over pairs of runs with the same seed."
    )
    title = f"Speed-up, {setting}" if setting else "Speed-up to the baseline's final quality"
    return Intervals(key, title, "times fewer steps", rows, note, reference=1.0, log=True)


def speedup_row(one: dict[str, Any], comparison: Comparison) -> Interval:
    arm = comparison.arm(as_text(one.get("arm")))
    estimate, bound = Estimate.of(one.get("speedup_steps")), as_text(as_dict(one.get("speedup_steps")).get("bound"))
    text = f"{bound} {show_factor(estimate)}".strip() if estimate.value is not None else "not measured"
    label, style = (arm.label, arm.style) if arm else (as_text(one.get("arm"), NOTHING), 0)
    verdict = as_text(one.get("verdict"), "cannot be judged")
    return Interval(label, style, estimate, text, "\n".join(sentences(one)), verdict)


def sentences(one: dict[str, Any]) -> list[str]:
    """What the comparison says of a pair, word for word, in steps and in seconds."""
    said = (as_text(one.get(key)) for key in ("sentence", "sentence_seconds"))
    return list(dict.fromkeys(sentence for sentence in said if sentence))


def numbers_table(comparison: Comparison) -> Table:
    columns = ["method", "finished", "diverged", "validation loss at the end"]
    has_fd = any(as_dict(arm.content.get("fd_curve")) for arm in comparison.arms)
    columns += [comparison.fd_name] * has_fd + ["seconds per step", "parameters"]
    parameters, rows = as_dict(comparison.content.get("parameters")), []
    for arm in comparison.arms:
        done = f"{arm.finished} of {len(arm.runs)}"
        loss, distance = (show_estimate(Estimate.of(arm.content.get(key))) for key in ("final_loss", "final_fd"))
        cells = [comparison.name_of(arm), done, diverged(arm), loss, *[distance] * has_fd]
        rows.append([*cells, pace(arm), show(parameters.get(arm.key))])
    note = "Mean over seeds and its 95 % interval; diverged: share with its 95 % interval."
    return Table("The numbers", columns, rows, note)


def diverged(arm: Arm) -> str:
    found = as_dict(arm.content.get("diverged"))
    count, of = whole(found.get("count")), whole(found.get("of"))
    if count is None or not of:
        return NOTHING
    low, high = finite(found.get("low")), finite(found.get("high"))
    share = f" ({low:.0%}{TO}{high:.0%})" if low is not None and high is not None else ""
    return f"{count} of {of}{share}"


def pace(arm: Arm) -> str:
    values = [value for run in arm.runs if (value := finite(run.content.get("seconds_per_step"))) is not None]
    return show(sum(values) / len(values), 3) if values else NOTHING


def difference_table(comparison: Comparison) -> list[Block]:
    """The paired differences at the end of training."""
    names = {"final_loss": "validation loss", "final_fd": comparison.fd_name, "oscillation": "oscillation"}
    pairs = as_dicts(comparison.content.get("comparisons"))
    rows = [row for one in pairs for key, name in names.items() for row in difference_row(comparison, one, key, name)]
    note = "Below 0 the method is lower. p is of a paired test; it is not corrected for the number of rows."
    columns = ("pair", "setting", "what", "difference (95 % interval)", "p")
    return [Table("Paired differences at the end", columns, rows, note, folded=True)] if rows else []


def difference_row(comparison: Comparison, one: dict[str, Any], key: str, name: str) -> list[tuple[str, ...]]:
    """One row, or none where it was not measured."""
    found = as_dict(one.get(key))
    estimate = Estimate.of(found, "difference")
    if estimate.value is None:
        return []
    given = [as_text(one.get(side), NOTHING) for side in ("arm", "baseline")]
    arms = [comparison.arm(side) for side in given]
    pair = " − ".join(arm.label if arm else side for arm, side in zip(arms, given, strict=True))
    setting = as_text(one.get("setting"), NOTHING)
    return [(pair, setting, name, show_estimate(estimate, 3), show(found.get("p"), 2))]
