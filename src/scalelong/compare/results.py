"""From the runs of a comparison to what they show: results.json and two CSV files, rewritten whenever a run ends."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from ..monitor.readings import with_nulls
from ..utils.atomic import replace_text
from ..utils.runtime import software
from .collect import OSCILLATIONS, Records, RunRecord, Series, initial_loss
from .edges import advice
from .grid import Arm, Plan, now, write_json
from .intervals import (
    CONFIDENCE,
    Curve,
    confidence_band,
    mean_interval,
    paired_difference,
    proportion_interval,
)
from .outcome import SIGMAS
from .speedup import Speedup, speedup
from .survival import Survival, compare_survival
from .sweeps import columns, describe_rates
from .transfer import describe_transfer

FILE = "results.json"
VERSION = 2

OF_RUN = (
    "arm",
    "label",
    "method",
    "lr",
    "depth",
    "batch",
    "width",
    "parametrization",
    "seed",
    "status",
    "cause",
    "step",
    "seconds",
    "seconds_per_step",
)
OF_RUN += ("final_loss", "final_fd", "message", "folder")

DONE = {"finished", "failed"}

Table = dict[str, Any]

software_once = cache(software)  # Asks git, and results are rewritten whenever a run ends.


@dataclass
class Metadata:
    """What is known of a comparison besides its runs' folders; the launcher keeps it up to date."""

    command: str
    created: str
    workers: int
    threads: int
    parameters: Mapping[str, int] = field(default_factory=dict)  # Of each arm.
    active: set[str] = field(default_factory=set)  # The folders of runs that are being trained.
    failures: dict[str, str] = field(default_factory=dict)  # The folders of runs that broke, and why.
    warnings: list[str] = field(default_factory=list)


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """results.json; results.csv, one row for each run; curves.csv, one row for each number of a curve."""
    write_json(folder / FILE, results)
    runs = ({**arm, **run, "arm": arm["id"]} for arm in results["arms"] for run in arm["runs"])
    write_rows(folder / "results.csv", OF_RUN, ([run[key] for key in OF_RUN] for run in runs))
    write_rows(folder / "curves.csv", ("arm", "seed", "curve", "step", "value"), curve_rows(results))


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    replace_text(path, text.getvalue())


def curve_rows(results: Mapping[str, Any]) -> Iterator[list[Any]]:
    for arm in results["arms"]:
        for curve in filter(None, (arm["loss_curve"], arm["fd_curve"])):
            name = curve.get("name", "validation loss")
            for run, values in zip(arm["runs"], curve["runs"], strict=True):
                points = zip(curve["steps"], values, strict=True)
                yield from ([arm["id"], run["seed"], name, step, value] for step, value in points if value is not None)


def summarise(plan: Plan, records: Records, metadata: Metadata) -> Table:
    """Everything in results.json; what cannot be had is null."""
    arms = [describe_arm(arm, records[arm.id], metadata) for arm in plan.arms]
    statuses = [run["status"] for arm in arms for run in arm["runs"]]
    missing, sweeps = set(statuses) - DONE, describe_rates(plan, records)
    content = {
        "version": VERSION,
        "recipe": plan.recipe,
        "description": plan.arms[0].config.description,
        "command": metadata.command,
        "created": metadata.created,
        "updated": now(),
        "status": "running" if missing - {"broken"} else "incomplete" if missing else "finished",
        "runs_done": sum(status in DONE for status in statuses),
        "runs_total": len(plan.runs),
        "environment": {**software_once(), "threads": metadata.threads, "workers": metadata.workers},
        "steps": plan.steps,
        "baseline": plan.baseline.id,
        "confidence": CONFIDENCE,
        "parameters": metadata.parameters,
        "arms": arms,
        "comparisons": [describe_pair(arm, base, records) for arm, base in plan.pairs()],
        "rate_sensitivity": sweeps,
        "edge_rates": list(plan.edge_rates),
        "transfer": describe_transfer(plan, records),
        "advice": advice(sweeps, plan.steps) if plan.edge_rates and sweeps else None,
        "warnings": [*metadata.warnings, *cautions(plan, records)],
    }
    return with_nulls(content)


def describe_arm(arm: Arm, runs: Sequence[RunRecord], metadata: Metadata) -> Table:
    ended = [run for run in runs if run.outcome is not None]
    failed = sum(run.failed for run in ended)
    low, high = proportion_interval(failed, len(ended))
    name = next((run.distance_name for run in runs if run.distance_name), None)
    return {
        "id": arm.id,
        "label": arm.label,
        "method": arm.method.name,
        "options": arm.options,
        **arm.axes,
        "setting": arm.setting,
        "initial_loss": initial_loss(runs),
        "nothing_loss": next((run.outcome.nothing_loss for run in ended if run.outcome is not None), None),
        "final_loss": asdict(mean_interval([run.final_loss for run in ended])),
        "final_fd": mean_of_all([run.final_distance for run in ended]),
        "final_fd_raw": mean_of_all([run.raw_distance for run in ended]),
        "runs": [describe_run(run, metadata) for run in runs],
        "loss_curve": describe_curves([run.losses for run in runs]),
        "fd_curve": name and {"name": name, **describe_curves([run.distances for run in runs])},
        "oscillation": {kind: mean_of_all([run.mean_oscillation(kind) for run in ended]) for kind in OSCILLATIONS},
        "oscillation_curve": describe_oscillation(runs),
        "failed": {"count": failed, "of": len(ended), "low": low, "high": high},
        "coefficients": describe_coefficients(runs),
        "noise_robustness": describe_noise(ended),
    }


def describe_run(run: RunRecord, metadata: Metadata) -> Table:
    message, final_loss, cause = metadata.failures.get(run.folder), None, None
    begun = "running" if run.folder in metadata.active or run.step else "pending"
    status = "broken" if message else begun
    if run.outcome is not None:
        status, message, cause = run.outcome.status, run.outcome.message, run.outcome.cause
        final_loss = run.final_loss
    times = {"seconds": run.seconds, "seconds_per_step": run.seconds_per_step}
    found = {"final_loss": final_loss, "final_fd": run.final_distance, "message": message}
    state = {"status": status, "cause": cause, "step": run.step}
    return {"seed": run.seed, "folder": run.folder, **state, **times, **found}


def describe_curves(runs: Sequence[Series]) -> Table:
    """Every run's curve on the steps of all of them, and the band of their mean."""
    band = confidence_band([Curve(tuple(run), tuple(run.values())) for run in runs])
    return {**asdict(band), "runs": [[run.get(step) for step in band.steps] for run in runs]}


def describe_oscillation(runs: Sequence[RunRecord]) -> Table | None:
    """The mean at each reading that all runs have which were read at all; one that failed ends it for the others."""
    read = {kind: [found for run in runs if (found := run.oscillation.get(kind))] for kind in OSCILLATIONS}
    every = [set(series) for many in read.values() for series in many]
    steps = sorted(set.intersection(*every)) if all(read.values()) else []
    means = {kind: [fmean(one[step] for one in many) for step in steps] for kind, many in read.items()}
    return {"steps": steps, **means} if steps else None


def describe_coefficients(runs: Sequence[RunRecord]) -> Table | None:
    indices = sorted({index for run in runs for index in run.coefficients})
    found = [mean_interval([run.coefficients[i] for run in runs if i in run.coefficients]) for i in indices]
    return {"index": indices, **columns(found)} if indices else None


def describe_noise(ended: Sequence[RunRecord]) -> Table | None:
    """Over all runs that ended: one that failed was not measured, and the mean of the others would flatter."""
    rows = [run.outcome.noise_losses for run in ended if run.outcome is not None and run.outcome.noise_losses]
    if not rows or len(rows) < len(ended):
        return None
    found = [mean_interval([math.nan if x is None else x for x in column]) for column in zip(*rows, strict=True)]
    return {"sigma": SIGMAS, **columns(found)}


def describe_pair(arm: Arm, base: Arm, records: Records) -> Table:
    """The method against the baseline, over the seeds of which both runs have ended: who survives more often, and who
    is faster where both survive."""
    both = zip(records[arm.id], records[base.id], strict=True)
    pairs = [(m, b) for m, b in both if m.outcome is not None and b.outcome is not None]
    whole = [(m, b) for m, b in pairs if m.survived and b.survived]
    survival = compare_survival([m.survived for m, _ in pairs], [b.survived for _, b in pairs])
    methods, bases = [m.curve for m, _ in whole], [b.curve for _, b in whole]
    steps, seconds = speedup(bases, methods, clock="steps"), speedup(bases, methods, clock="seconds")
    found: Table = {"arm": arm.id, "baseline": base.id, "setting": arm.setting, "pairs": len(pairs)}
    for one in (steps, seconds):
        low, high = (one.low, one.high) if one.varies else (None, None)
        found[f"speedup_{one.clock}"] = {"value": one.value, "low": low, "high": high, "bound": one.bound}
    return {
        **found,
        "survival": {**asdict(survival), "verdict": survival.verdict},
        "verdict": survival.verdict or steps.verdict,
        "sentence": sentence(survival, steps, arm.label, base.label),
        "verdict_seconds": survival.verdict or seconds.verdict,
        "sentence_seconds": sentence(survival, seconds, arm.label, base.label),
        "more_seeds": steps.more_seeds,
        "final_loss": difference([(m.final_loss, b.final_loss) for m, b in whole]),
        "final_fd": difference([(m.final_distance, b.final_distance) for m, b in whole]),
        "oscillation": difference([(m.mean_oscillation("feature"), b.mean_oscillation("feature")) for m, b in pairs]),
    }


def sentence(survival: Survival, speed: Speedup, label: str, baseline: str) -> str:
    """What was found, survival first if a run failed; then speed, of the pairs in which both runs survived."""
    said = speed.sentence(label, baseline)
    if survival.survived == survival.baseline == survival.of:
        return said
    both = f"Both survive with {speed.pairs} of {survival.of} seeds"
    of_those = f"{both}; of those: {said}" if speed.pairs >= 2 else f"{both}: their speed cannot be judged."
    return f"{survival.sentence(label, baseline)} {of_those}"


def difference(pairs: Sequence[tuple[float | None, float | None]]) -> Table | None:
    """Method minus baseline; None if a number is missing."""
    whole = [(m, b) for m, b in pairs if m is not None and b is not None]
    if not whole or len(whole) < len(pairs):
        return None
    found = paired_difference([m for m, _ in whole], [b for _, b in whole])
    return {"difference": found.value, "low": found.low, "high": found.high, "p": found.p}


def cautions(plan: Plan, records: Records) -> list[str]:
    """What a reader of the numbers should know."""
    found = []
    # Where the edge or the best rate is looked for, some rates are too large on purpose.
    for arm in () if plan.edge_rates or plan.transfer else plan.arms:
        if lost := {run.seed: run.outcome for run in records[arm.id] if run.outcome and run.failed}:
            seeds, first = ", ".join(map(str, lost)), next(iter(lost.values()))
            found.append(f"{arm.label} ({arm.setting}): failed with seed {seeds}: {first.cause}: {first.message}")
    if len(plan.seeds) < 3:
        found.append(f"{len(plan.seeds)} seeds say little: intervals need at least 3 to be of use")
    return found


def mean_of_all(values: Sequence[float | None]) -> Table | None:
    """The mean over runs that ended, with its interval; None if one has no value: without it the mean would flatter."""
    found = [value for value in values if value is not None]
    return asdict(mean_interval(found)) if found and len(found) == len(values) else None
