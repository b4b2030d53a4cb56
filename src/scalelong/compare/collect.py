"""From a run's folder to the numbers that a comparison is made of; an unfinished run gives what it has."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.schema import EvaluationConfig
from ..evaluation.results import FILE as EVALUATIONS
from ..evaluation.results import Evaluation, read_evaluations
from ..runs import Run, read_metrics
from ..utils.sessions import trained_seconds
from .curves import Curve
from .outcome import Outcome, read_outcome
from .plan import PlannedRun

Line = Mapping[str, Any]

END = 0.1
"""The last tenth of the readings tells the coefficients at the end: those of LS differ from batch to batch."""
OSCILLATIONS = ("feature", "gradient")


@dataclass(frozen=True)
class Series:
    """Numbers over the steps of a run."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None


@dataclass(frozen=True)
class RunRecord:
    """What one run shows so far."""

    seed: int
    folder: str
    step: int = 0
    outcome: Outcome | None = None
    losses: Series = Series()
    """Validation loss of the EMA weights."""
    distances: Series = Series()
    raw_distance: float | None = None
    """At the end, of the weights of the last step instead of averaged ones."""
    distance_name: str | None = None
    oscillation: dict[str, Series] = field(default_factory=dict)
    """Of features and gradients: the mean of the index over blocks and skips."""
    coefficients: dict[int, float] = field(default_factory=dict)
    """κ_i at the end, by the skip's index."""
    seconds: float = 0.0
    seconds_per_step: float | None = None

    @property
    def curve(self) -> Curve:
        """The validation losses for the statistics; a run that diverged ends with an infinite one."""
        steps, losses = list(self.losses.steps), list(self.losses.values)
        if self.outcome is not None and self.outcome.status == "diverged":
            steps, losses = (steps, losses[:-1]) if steps else ([max(1, self.step)], [])
            losses.append(math.inf)
        return Curve(tuple(steps), tuple(losses), self.seconds_per_step or 1.0)

    @property
    def final_loss(self) -> float:
        """Infinite for a run that diverged."""
        curve = self.curve
        return curve.losses[-1] if curve.losses else math.nan

    @property
    def final_distance(self) -> float | None:
        """That of the last step; a run that did not come to it has none."""
        finished = self.outcome is not None and self.outcome.status == "finished"
        return self.distances.last if finished and self.distances.steps[-1:] == (self.step,) else None


Records = Mapping[str, Sequence[RunRecord]]
"""By arm, one for each seed, in the plan's order."""


def collect(out: Path, run: PlannedRun) -> RunRecord:
    """Read a run's folder; one that was not begun has nothing."""
    folder = out / run.folder
    path = Run(folder).metrics.path
    if not path.is_file():
        return RunRecord(run.seed, str(run.folder))
    lines = read_metrics(path)
    readings = [line for line in lines if is_reading(line)]
    name, distances = read_distances(folder, run.config.evaluation)
    return RunRecord(
        seed=run.seed,
        folder=str(run.folder),
        step=lines[-1]["step"] if lines else 0,
        outcome=read_outcome(folder),
        losses=series(lines, "validation_loss_ema"),
        distances=distances,
        raw_distance=read_raw_distance(folder, run.config),
        distance_name=name,
        oscillation={kind: mean_oscillation(readings, kind) for kind in OSCILLATIONS},
        coefficients=last_coefficients(readings),
        seconds=total_seconds(Run(folder), lines),
        seconds_per_step=step_seconds(lines, run.arm.batch),
    )


def is_reading(line: Line) -> bool:
    """Whether a line is the monitor's; the event of an oscillation names a skip too."""
    return "event" not in line and any(key.startswith(("skip", "block/")) for key in line)


def series(lines: Sequence[Line], key: str) -> Series:
    found = {line["step"]: float(line[key]) for line in lines if key in line}
    return Series(tuple(found), tuple(found.values()))


def read_distances(folder: Path, wanted: EvaluationConfig) -> tuple[str | None, Series]:
    """The Fréchet distance over the steps, evaluated as the recipe says; of EMA weights if they were."""
    found = evaluations(folder, wanted)
    averaged = [one for one in found if one.weights == "ema"] or found
    same = [one for one in averaged if one.fingerprint == averaged[-1].fingerprint]
    if not same:
        return None, Series()
    name = distance_of(same[-1])
    assert name is not None, "evaluations without a distance were left out"
    points = sorted((one.step, one.figures[name].value) for one in same)
    return name, Series(tuple(step for step, _ in points), tuple(value for _, value in points))


def read_raw_distance(folder: Path, config: Config) -> float | None:
    """That of raw weights at the last step, beside averaged ones."""
    last = [one for one in evaluations(folder, config.evaluation) if one.step == config.training.steps]
    raw = [one for one in last if one.weights == "raw"]
    name = distance_of(raw[-1]) if len(raw) < len(last) and raw else None
    return None if name is None else raw[-1].figures[name].value


def evaluations(folder: Path, wanted: EvaluationConfig) -> list[Evaluation]:
    """Those of a run with a Fréchet distance of the wanted network and number of images; others are not comparable."""
    there = read_evaluations(folder) if (folder / EVALUATIONS).is_file() else []
    # The recipe names a network, a network with its weights, or the path of a file, which is called by its name.
    names = {wanted.network, wanted.network.partition(":")[0], Path(wanted.network).name}
    # A run's own evaluations begin with image 0; others were made by hand.
    own = [one for one in there if one.seed == 0]
    same = [
        one for one in own if one.fingerprint.get("network") in names and one.fingerprint.get("images") == wanted.images
    ]
    return [one for one in same if distance_of(one)]


def evaluated_weights(folder: Path, config: Config) -> set[Any]:
    """The weights of the last step whose images were evaluated."""
    return {one.weights for one in evaluations(folder, config.evaluation) if one.step == config.training.steps}


def distance_of(one: Evaluation) -> str | None:
    """The name of an evaluation's Fréchet distance: FID, or FD- and the network."""
    return next((name for name in one.figures if name == "FID" or name.startswith("FD-")), None)


def mean_oscillation(readings: Sequence[Line], kind: str) -> Series:
    """The oscillation index of features or gradients at each reading, on average over blocks and skips."""
    ending, found = f"/{kind}_oscillation", {}
    for line in readings:
        values = [float(value) for key, value in line.items() if key.endswith(ending)]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            found[line["step"]] = statistics.fmean(finite)
    return Series(tuple(found), tuple(found.values()))


def last_coefficients(readings: Sequence[Line]) -> dict[int, float]:
    """κ_i of each skip, on average over the last readings; empty if the skips are not scaled."""
    last = readings[-max(1, round(END * len(readings))) :]
    names = sorted({key for line in last for key in line if key.endswith("/coefficient")})
    found = {}
    for name in names:
        values = [float(line[name]) for line in last if name in line]
        found[int(name.split("/")[0].removeprefix("skip"))] = statistics.fmean(values)
    return dict(sorted(found.items()))


def step_seconds(lines: Sequence[Line], batch: int) -> float | None:
    """The median over the logged laps: those with an evaluation or a checkpoint in them are the fewer ones."""
    rates = [line["images_per_second"] for line in lines if line.get("images_per_second")]
    return batch / statistics.median(rates) if rates else None


def total_seconds(run: Run, lines: Sequence[Line]) -> float:
    """The time of the training loop, over all sessions of a run."""
    file = run.environment_file
    starts = json.loads(file.read_bytes()) if file.is_file() else []
    times = [(line["step"], line["seconds"]) for line in lines if "seconds" in line]
    return trained_seconds(times, [start["step"] for start in starts]) or 0.0
