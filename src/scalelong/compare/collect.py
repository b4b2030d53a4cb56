"""From a run's folder to the numbers that a comparison is made of; an unfinished run gives what it has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..config import Config
from ..runs import Run, read_metrics
from ..utils.records import damage_of_run, is_reading, trained_seconds
from .grid import PlannedRun
from .intervals import Curve
from .outcome import Outcome, distance_of, evaluations, read_outcome

END = 0.1  # The last tenth of the readings gives the coefficients: those of LS differ from batch to batch.
OSCILLATIONS = ("feature", "gradient")

Line = Mapping[str, Any]
Series = dict[int, float]
"""Numbers by step, in the order of the steps."""


@dataclass(frozen=True)
class RunRecord:
    """What one run shows so far."""

    seed: int
    folder: str
    step: int = 0
    outcome: Outcome | None = None
    losses: Series = field(default_factory=dict)  # Validation loss of the EMA weights.
    distances: Series = field(default_factory=dict)
    raw_distance: float | None = None  # At the end, of the weights of the last step instead of EMA weights.
    distance_name: str | None = None
    oscillation: dict[str, Series] = field(default_factory=dict)  # By kind: the index, over blocks and skips.
    coefficients: dict[int, float] = field(default_factory=dict)  # κ_i at the end, by the skip's index.
    seconds: float = 0.0  # Of the training loop, over all sessions.
    seconds_per_step: float | None = None
    damage: str | None = None  # What is lost of its log; such a run is no part of any result.

    @property
    def failed(self) -> bool:
        return self.outcome is not None and self.outcome.status == "failed"

    @property
    def survived(self) -> bool:
        return self.outcome is not None and self.outcome.status == "finished"

    @property
    def curve(self) -> Curve:
        """The validation losses for the statistics; a run that failed ends with an infinite one."""
        losses = self.losses
        if self.failed:
            losses = {**losses, max(losses, default=max(1, self.step)): math.inf}
        return Curve(tuple(losses), tuple(losses.values()), self.seconds_per_step or 1.0)

    @property
    def final_loss(self) -> float:
        """Infinite for a run that failed."""
        return next(reversed(self.curve.losses), math.nan)

    @property
    def measured_loss(self) -> float:
        """The last one that was measured, also of a run that did not learn; infinite where the numbers broke."""
        broke = self.failed and self.outcome is not None and self.outcome.cause != "did not learn"
        return math.inf if broke else next(reversed(self.losses.values()), math.nan)

    @property
    def final_distance(self) -> float | None:
        """That of the last step; a run that did not come to it has none."""
        return self.distances.get(self.step) if self.survived else None

    def mean_oscillation(self, kind: str) -> float | None:
        """The mean of the run's oscillation index; None if it was never read."""
        values = self.oscillation.get(kind, {}).values()
        return fmean(values) if values else None


Records = Mapping[str, Sequence[RunRecord]]
"""By arm, one for each seed, in the plan's order."""


def initial_loss(runs: Sequence[RunRecord]) -> float | None:
    """The validation loss before training, on average over the runs that have ended."""
    found = [run.outcome.initial_loss for run in runs if run.outcome is not None and run.outcome.initial_loss]
    return fmean(found) if found else None


def collect(out: Path, run: PlannedRun) -> RunRecord:
    """Read a run's folder; one that was not begun has nothing."""
    folder = out / run.folder
    files, outcome = Run(folder), read_outcome(folder)
    lines = read_metrics(files.metrics.path)
    marks = [line["message"] for line in lines if line.get("event") == "log damaged"]
    if damage := (outcome and damage_of_run(folder)) or next(iter(marks), None):
        return RunRecord(run.seed, str(run.folder), damage=f"{damage}. Remove {folder} to make the run again")
    if not lines:
        return RunRecord(run.seed, str(run.folder), outcome=outcome)
    # An event may name a block too, but is no reading of the monitor.
    readings = [line for line in lines if "event" not in line and is_reading(line)]
    # The median over the logged laps: those with an evaluation or a checkpoint in them are the fewer ones.
    speeds = [line["images_per_second"] for line in lines if line.get("images_per_second")]
    times = [(line["step"], line["seconds"]) for line in lines if "seconds" in line]
    name, distances, raw_distance = read_distances(folder, run.config)
    return RunRecord(
        seed=run.seed,
        folder=str(run.folder),
        step=lines[-1]["step"] if lines else 0,
        outcome=outcome,
        losses={ln["step"]: float(ln["validation_loss_ema"]) for ln in lines if "validation_loss_ema" in ln},
        distances=distances,
        raw_distance=raw_distance,
        distance_name=name,
        oscillation={kind: read_oscillation(readings, f"/{kind}_oscillation") for kind in OSCILLATIONS},
        coefficients=last_coefficients(readings),
        seconds=trained_seconds(times, [start.get("step", 0) for start in files.starts()]) or 0.0,
        seconds_per_step=run.config.training.batch_size / median(speeds) if speeds else None,
    )


def read_oscillation(readings: Sequence[Line], ending: str) -> Series:
    """The oscillation index at each reading, on average over blocks and skips."""
    found = {}
    for line in readings:
        values = [float(value) for key, value in line.items() if key.endswith(ending)]
        if finite := [value for value in values if math.isfinite(value)]:
            found[line["step"]] = fmean(finite)
    return found


def last_coefficients(readings: Sequence[Line]) -> dict[int, float]:
    """κ_i of each skip, on average over the last readings; empty if the skips are not scaled."""
    found: dict[int, list[float]] = {}
    for line in readings[-max(1, round(END * len(readings))) :]:
        for key in line:
            if key.endswith("/coefficient"):
                found.setdefault(int(key.split("/")[0].removeprefix("skip")), []).append(float(line[key]))
    return {index: fmean(values) for index, values in sorted(found.items())}


def read_distances(folder: Path, config: Config) -> tuple[str | None, Series, float | None]:
    """The Fréchet distance over the steps, of EMA weights if there are any; and at the end that of raw weights beside
    them."""
    found = evaluations(folder, config.evaluation)
    ema = [one for one in found if one.weights == "ema"] or found
    if not ema:
        return None, {}, None
    name = distance_of(ema[-1])
    points = sorted((one.step, one.figures[name].value) for one in ema if one.fingerprint == ema[-1].fingerprint)
    last = {one.weights: one for one in found if one.step == config.training.steps}
    raw = last["raw"].figures[name].value if {"raw", "ema"} <= set(last) else None
    return name, dict(points), raw
