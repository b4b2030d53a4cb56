"""The search for the edge in a training loop that is not ours: in this process, one run after the other."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from torch import nn

from ..skips import scale_skips
from ..utils.atomic import replace_text
from .edges import Table, advice, describe_edge
from .failure import Cause, Reference, cause_of_failure, has_clearly_failed
from .methods import Method, PlanError, check_rates
from .survival import RateTable, next_rates

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Scale = Callable[[Any], Any]
"""Scales the skips of a model in place, and returns it."""
Train = Callable[[Scale, float, int], Iterable[float]]

PARTS = 20
"""Into so many parts the losses of a run are cut, to see whether it has clearly failed."""
END = 0.1  # The mean of the last tenth of the losses is what a run ends with.


@dataclass(frozen=True)
class LoopRun:
    """A run of the user's loop; `stopped` if it was not let come to its end."""

    method: str
    lr: float
    seed: int
    steps: int
    loss: float | None
    cause: Cause | None = None
    stopped: bool = False


@dataclass(frozen=True)
class FoundEdges:
    """A table for each method, as `rate_sensitivity` of results.json has them, and what to train with."""

    methods: tuple[Table, ...]
    advice: str

    def __str__(self) -> str:
        return "\n".join([*(f"- {found['sentence']}" for found in self.methods), self.advice])


def find_edge(
    train: Train,
    *,
    lrs: Sequence[float],
    methods: Sequence[str] = ("none", "cs", "ls"),
    seeds: int = 8,
    nothing: float = 1.0,
    must_gain: float = 0.5,
    file: str | Path | None = None,
) -> FoundEdges:
    """The largest learning rate that your training survives, for each method.

    `train(scale, lr, seed)` builds a model from the seed, calls `scale(model)` on it, trains it at that rate, and
    returns or yields the loss of every step; one that yields is stopped as soon as it has clearly failed. A run fails
    if it does not come down `must_gain` of the way from `nothing`, the loss of predicting nothing, to 0: predicted
    noise costs 1 per pixel. Methods are named as for `scalelong edge`, the first or `none` is the baseline. With a
    `file`, every run is kept there, and the same call again resumes.
    """
    chosen, first = [Method.parse(text) for text in methods], sorted({*lrs})
    if len(first) < 2 or seeds < 1 or not chosen:
        raise PlanError(
            f"an edge takes two learning rates, a seed and a method at least, not {lrs}, {seeds}, {methods}"
        )
    check_rates(chosen, first)
    loop = Loop(train, Reference(nothing), must_gain, first, None if file is None else Path(file))
    rates = {method: list(first) for method in chosen}
    while any((wanted := {method: loop.closer(method, rates[method], seeds) for method in chosen}).values()):
        rates = {method: sorted({*rates[method], *wanted[method]}) for method in chosen}
    tables = {method: loop.table(method, rates[method], seeds) for method in chosen}
    baseline = next((method for method in chosen if method.name == "none"), chosen[0])
    found = []
    for method, table in tables.items():
        base = None if method == baseline else (label_of(baseline), tables[baseline])
        told = describe_edge(label_of(method), table, base, shared=first, untrained=nothing, steps=loop.planned or 0)
        found.append({"method": method.id, "label": label_of(method), **told})
    return FoundEdges(tuple(found), advice(found, loop.planned or 0))


def label_of(method: Method) -> str:
    return method.label({**method.constants, **method.options})


class Loop:
    """The runs of a user's loop that there are, and how to make one more."""

    def __init__(
        self, train: Train, reference: Reference, must_gain: float, first: Sequence[float], file: Path | None
    ) -> None:
        self.train, self.reference, self.must_gain, self.first, self.file = train, reference, must_gain, first, file
        self.settings = {"nothing": reference.nothing, "must_gain": must_gain, "lrs": list(first)}
        self.runs: dict[tuple[str, float, int], LoopRun] = {}
        if file is not None and file.is_file():
            self.load(file)

    @property
    def planned(self) -> int | None:
        """How many losses a run has that comes to its end; None before there is one."""
        return max((run.steps for run in self.runs.values() if not run.stopped), default=None)

    def closer(self, method: Method, rates: Sequence[float], seeds: int) -> list[float]:
        """Make the runs of a method at these rates; where to look next."""
        found = self.table(method, rates, seeds)
        return next_rates(found.rates, found.counts, seeds, self.first)

    def table(self, method: Method, rates: Sequence[float], seeds: int) -> RateTable:
        rows = [[self.run(method, rate, seed) for seed in range(seeds)] for rate in rates]
        survived = tuple(tuple(run.cause is None for run in row) for row in rows)
        losses = tuple(tuple(math.inf if run.loss is None else run.loss for run in row) for row in rows)
        return RateTable(tuple(range(seeds)), tuple(rates), survived, losses)

    def run(self, method: Method, lr: float, seed: int) -> LoopRun:
        """The run as it was made before, or made now."""
        key = (method.id, lr, seed)
        if key not in self.runs:
            self.runs[key] = self.make(method, lr, seed)
            self.save()
        return self.runs[key]

    def make(self, method: Method, lr: float, seed: int) -> LoopRun:
        def scale(model: Model) -> Model:
            return scale_skips(model, method.name, **method.options)

        losses, stopped = self.losses_of(self.train(scale, lr, seed))
        if not losses:
            raise ValueError(f"train returned no losses for lr {lr:g}, seed {seed}: return or yield that of every step")
        loss = fmean(losses[-max(1, round(END * len(losses))) :])
        cause = cause_of_failure(loss, self.reference.limit(self.must_gain))
        logger.info("%s, lr %g, seed %d: %s, loss %.4g", label_of(method), lr, seed, cause or "survived", loss)
        return LoopRun(method.id, lr, seed, len(losses), loss if math.isfinite(loss) else None, cause, stopped)

    def losses_of(self, found: Iterable[float]) -> tuple[list[float], bool]:
        """The losses of a run, and whether it was stopped as it had clearly failed."""
        losses: list[float] = []
        planned = self.planned  # Before the first run has ended, how long runs are is not known.
        part = max(1, (planned or 0) // PARTS)
        for loss in found:
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                return losses, True
            if planned is not None and len(losses) % part == 0:
                means = [fmean(losses[k : k + part]) for k in range(0, len(losses), part)]
                if has_clearly_failed(means, self.reference, self.must_gain, planned // part):
                    return losses, len(losses) < planned
        return losses, False

    def load(self, file: Path) -> None:
        content = json.loads(file.read_bytes())
        if content["settings"] != self.settings:
            raise PlanError(f"{file} holds runs of {content['settings']}, not of {self.settings}: name another file")
        runs = [LoopRun(**run) for run in content["runs"]]
        self.runs = {(run.method, run.lr, run.seed): run for run in runs}

    def save(self) -> None:
        if self.file is not None:
            content = {"settings": self.settings, "runs": [asdict(run) for run in self.runs.values()]}
            replace_text(self.file, json.dumps(content, indent=1) + "\n")
