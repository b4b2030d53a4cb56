"""From the runs of a comparison to what they show: one JSON-ready table, rewritten whenever a run ends."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..monitor.readings import with_nulls
from ..runs.run_dir import git_commit, versions
from .bands import confidence_band
from .collect import OSCILLATIONS, Records, RunRecord, Series
from .curves import Curve
from .intervals import CONFIDENCE, as_dict, columns, mean_interval, paired_difference, proportion_interval
from .outcome import SIGMAS
from .plan import Arm, Plan
from .speedup import speedup
from .sweeps import describe_rates, initial_loss
from .verdicts import Speedup

FILE = "results.json"
VERSION = 1


@dataclass(frozen=True)
class Circumstances:
    """What is known of a comparison besides its runs' folders."""

    command: str
    created: str
    updated: str
    workers: int
    threads: int
    active: frozenset[str] = frozenset()
    """The folders of runs that are being trained."""
    failures: tuple[tuple[str, str], ...] = ()
    """The folders of runs that failed, and why."""
    warnings: tuple[str, ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    """Of each arm."""


def summarise(plan: Plan, records: Records, around: Circumstances) -> dict[str, Any]:
    """Everything in results.json; what cannot be had is null."""
    arms = [describe_arm(arm, records[arm.id], around) for arm in plan.arms]
    done = sum(run["status"] in ("finished", "diverged") for arm in arms for run in arm["runs"])
    content = {
        "version": VERSION,
        "recipe": plan.recipe,
        "description": plan.arms[0].config.description,
        "command": around.command,
        "created": around.created,
        "updated": around.updated,
        "status": overall_status(arms),
        "runs_done": done,
        "runs_total": len(plan.runs),
        "environment": environment(around),
        "steps": plan.steps,
        "baseline": plan.baseline.id,
        "confidence": CONFIDENCE,
        "parameters": dict(around.parameters),
        "arms": arms,
        "comparisons": [describe_pair(arm, base, records) for arm, base in plan.pairs()],
        "rate_sensitivity": describe_rates(plan, records),
        "warnings": [*around.warnings, *cautions(plan, records)],
    }
    return with_nulls(content)


def overall_status(arms: Sequence[Mapping[str, Any]]) -> str:
    """finished, running, or incomplete where all that is missing has failed."""
    states = {run["status"] for arm in arms for run in arm["runs"]}
    if states <= {"finished", "diverged"}:
        return "finished"
    return "incomplete" if states <= {"finished", "diverged", "failed"} else "running"


def environment(around: Circumstances) -> dict[str, Any]:
    return {**software(), "threads": around.threads, "workers": around.workers}


@cache
def software() -> dict[str, Any]:
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "commit": git_commit(Path(__file__).parent),
        "platform": platform.platform(),
    }


def describe_arm(arm: Arm, runs: Sequence[RunRecord], around: Circumstances) -> dict[str, Any]:
    diverged = [run for run in runs if run.outcome is not None and run.outcome.status == "diverged"]
    ended = [run for run in runs if run.outcome is not None]
    low, high = proportion_interval(len(diverged), len(ended))
    return {
        "id": arm.id,
        "label": arm.label,
        "method": arm.method.name,
        "options": arm.options,
        "lr": arm.lr,
        "depth": arm.depth,
        "batch": arm.batch,
        "setting": arm.setting,
        "initial_loss": initial_loss(runs),
        "final_loss": as_dict(mean_interval([run.final_loss for run in ended])),
        "final_fd": mean_of_all([run.final_distance for run in ended]),
        "final_fd_raw": mean_of_all([run.raw_distance for run in ended]),
        "runs": [describe_run(run, around) for run in runs],
        "loss_curve": describe_curves([run.losses for run in runs]),
        "fd_curve": describe_distances(runs),
        "oscillation": {kind: mean_of_all([oscillation_of(run, kind) for run in ended]) for kind in OSCILLATIONS},
        "oscillation_curve": describe_oscillation(runs),
        "diverged": {"count": len(diverged), "of": len(ended), "low": low, "high": high},
        "coefficients": describe_coefficients(runs),
        "noise_robustness": describe_noise(ended),
    }


def describe_run(run: RunRecord, around: Circumstances) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "folder": run.folder,
        "status": status_of(run, around),
        "step": run.step,
        "seconds": run.seconds,
        "seconds_per_step": run.seconds_per_step,
        "final_loss": run.final_loss if run.outcome is not None and math.isfinite(run.final_loss) else None,
        "final_fd": run.final_distance,
        "message": run.outcome.message if run.outcome is not None else dict(around.failures).get(run.folder),
    }


def status_of(run: RunRecord, around: Circumstances) -> str:
    if run.outcome is not None:
        return run.outcome.status
    if run.folder in dict(around.failures):
        return "failed"
    return "running" if run.folder in around.active or run.step else "pending"


def describe_curves(runs: Sequence[Series], name: str | None = None) -> dict[str, Any]:
    """Every run's curve on the steps of all of them, and the band of their mean."""
    band = confidence_band([Curve(run.steps, run.values) for run in runs], CONFIDENCE)
    tables = [dict(zip(run.steps, run.values, strict=True)) for run in runs]
    rows = [[table.get(step) for step in band.steps] for table in tables]
    curves = {"steps": band.steps, "mean": band.mean, "low": band.low, "high": band.high, "runs": rows}
    return curves if name is None else {"name": name, **curves}


def describe_distances(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    name = next((run.distance_name for run in runs if run.distance_name), None)
    return None if name is None else describe_curves([run.distances for run in runs], name)


def mean_of_all(values: Sequence[float | None]) -> dict[str, Any] | None:
    """The mean over runs that ended, with its interval; None if one has no value: without it the mean would flatter."""
    found = [value for value in values if value is not None]
    return as_dict(mean_interval(found)) if found and len(found) == len(values) else None


def describe_oscillation(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The mean at each reading that all runs have which were read at all; one that diverged ends it for the others."""
    tables = {kind: [readings for run in runs if (readings := readings_of(run, kind))] for kind in OSCILLATIONS}
    every = [set(table) for many in tables.values() for table in many]
    steps = sorted(set.intersection(*every)) if all(tables.values()) else []
    if not steps:
        return None
    means = {kind: [math.fsum(t[s] for t in many) / len(many) for s in steps] for kind, many in tables.items()}
    return {"steps": steps, **means}


def readings_of(run: RunRecord, kind: str) -> dict[int, float]:
    """The oscillation index by step."""
    found = run.oscillation.get(kind, Series())
    return dict(zip(found.steps, found.values, strict=True))


def describe_coefficients(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    indices = sorted({index for run in runs for index in run.coefficients})
    if not indices:
        return None
    found = [mean_interval([run.coefficients[i] for run in runs if i in run.coefficients]) for i in indices]
    return {"index": indices, **columns(found)}


def describe_noise(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Over all runs that ended: one that diverged was not measured, and the mean of the others would flatter."""
    rows = [run.outcome.noise_losses for run in runs if run.outcome is not None and run.outcome.noise_losses]
    if not rows or len(rows) < len(runs):
        return None
    found = [mean_interval([math.nan if x is None else x for x in column]) for column in zip(*rows, strict=True)]
    return {"sigma": list(SIGMAS), **columns(found)}


def describe_pair(arm: Arm, base: Arm, records: Records) -> dict[str, Any]:
    """The method against the baseline, over the seeds of which both runs have ended."""
    both = zip(records[base.id], records[arm.id], strict=True)
    pairs = [(b, m) for b, m in both if b.outcome is not None and m.outcome is not None]
    steps, seconds = (compare_curves(pairs, clock) for clock in ("steps", "seconds"))
    return {
        "arm": arm.id,
        "baseline": base.id,
        "setting": arm.setting,
        "pairs": len(pairs),
        "speedup_steps": factor(steps),
        "speedup_seconds": factor(seconds),
        "verdict": steps.verdict,
        "sentence": steps.sentence(arm.label, base.label),
        "verdict_seconds": seconds.verdict,
        "sentence_seconds": seconds.sentence(arm.label, base.label),
        "more_seeds": steps.more_seeds,
        "final_loss": difference([(m.final_loss, b.final_loss) for b, m in pairs]),
        "final_fd": difference([(m.final_distance, b.final_distance) for b, m in pairs]),
        "oscillation": difference([(oscillation_of(m, "feature"), oscillation_of(b, "feature")) for b, m in pairs]),
    }


def compare_curves(pairs: Sequence[tuple[RunRecord, RunRecord]], clock: Any) -> Speedup:
    curves = [base.curve for base, _ in pairs], [method.curve for _, method in pairs]
    return speedup(*curves, clock=clock, confidence=CONFIDENCE)


def oscillation_of(run: RunRecord, kind: str) -> float | None:
    """The mean of a run's oscillation index; None if it was never read."""
    values = readings_of(run, kind).values()
    return math.fsum(values) / len(values) if values else None


def difference(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any] | None:
    """Method minus baseline; None if a number is missing."""
    whole = [(m, b) for m, b in pairs if m is not None and b is not None]
    if not whole or len(whole) < len(pairs):
        return None
    found = paired_difference([m for m, _ in whole], [b for _, b in whole], CONFIDENCE)
    return {"difference": found.value, "low": found.low, "high": found.high, "p": found.p}


def cautions(plan: Plan, records: Records) -> list[str]:
    """What a reader of the numbers should know."""
    found = []
    for arm in plan.arms:
        lost = [run for run in records[arm.id] if run.outcome is not None and run.outcome.status == "diverged"]
        if lost:
            seeds = ", ".join(str(run.seed) for run in lost)
            found.append(f"{arm.label} ({arm.setting}): diverged with seed {seeds}: {lost[0].outcome.message}")  # pyright: ignore[reportOptionalMemberAccess]
    if len(plan.seeds) < 3:
        found.append(f"{len(plan.seeds)} seeds say little: intervals need at least 3 to be of use")
    return found


def factor(found: Speedup) -> dict[str, Any]:
    """A speed-up; `bound` says that it is at least or at most so large, which may be all that is known."""
    low, high = (found.low, found.high) if found.varies else (None, None)
    return {"value": found.value, "low": low, "high": high, "bound": found.bound}
