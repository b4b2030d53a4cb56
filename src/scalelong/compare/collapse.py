"""Where a run collapsed, and the checkpoints before that from which it can be replayed: read from the run's files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any

from ..config import Config
from ..guard.losses import WINDOW, LossWatch
from ..runs import Checkpoint, CheckpointError, Run, RunError, read_metrics
from ..training.loss import open_validation
from .failure import cause_of_failure
from .reference import reference_of

LEARNED = 0.1
"""What the loss must have come below that of predicting nothing, as a share of it, before it can collapse."""


@dataclass
class Attempt:
    """What a run did until its seat belt went back, or it ended: the mean losses that it logged, by step."""

    offset: int
    """Batches that were left out by earlier returns: step k took batch k + offset."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    failed_at: int | None = None
    """The step at which the belt went back, or the run was given up."""
    skipped: list[int] = field(default_factory=list)
    """Steps that were not finite."""


@dataclass(frozen=True)
class Collapse:
    """A collapse and where to replay it from; `watch` is what was known of the losses at each checkpoint."""

    config: Config
    step: int
    """The last step before the losses were no longer healthy."""
    seen: int
    """The step at which it was plain."""
    checkpoints: tuple[Checkpoint, ...]
    """The last that is clearly older than the collapse, then later ones."""
    stored: tuple[Checkpoint, ...]
    """All of the run, by step."""
    nothing: float
    limit: float
    """What a replay must come down to, where the run never learned."""
    losses: tuple[tuple[int, float], ...]
    every: int
    factor: float
    """By what the seat belt multiplied the rate then."""

    def watch(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What a `LossWatch` knew after the checkpoint's step, by the losses that were logged."""
        belt = checkpoint.state().get("belt") or {}
        if (known := belt.get("watch") or {}).get("best") is not None:
            return {**known, "nothing": self.nothing, "state": "healthy", "above": 0}
        watch = LossWatch(self.nothing)
        for _ in windows([pair for pair in self.losses if pair[0] <= checkpoint.step], self.every, watch):
            pass
        return watch.state_dict()


def find_collapse(run: Run, *, start: int | None = None, allow_code: bool = False) -> Collapse:
    """The first collapse of a run that has a checkpoint before it; raises RunError, in one line, if there is none.

    `start` names the step of the checkpoint to begin at.
    """
    config = run.config(allow_code=allow_code)
    if not run.metrics.path.is_file():
        raise RunError(f"{run.folder} has no {run.metrics.path.name}: nothing says whether the run collapsed")
    reference, every = reference_of(open_validation(config)), config.training.log_every
    nothing, limit = reference.nothing, reference.limit(config.training.must_gain)
    attempts = attempts_of(read_metrics(run.metrics.path))
    places = [place_of(attempt, every, nothing) for attempt in attempts]
    found = [(attempt, *place) for attempt, place in zip(attempts, places, strict=True) if place is not None]
    if found:
        limit = math.inf
    elif (place := unlearned(attempts[-1], limit)) is not None:
        found = [(attempts[-1], *place)]
    if not found:
        raise RunError(no_collapse(run, attempts, nothing))
    stored = stored_checkpoints(run)
    for attempt, step, seen in found:
        own = [one for one in stored if one.step < seen and one.state().get("batch_offset") == attempt.offset]
        own = [one for one in own if start is None or one.step == start]
        if own:
            first = max((n for n, one in enumerate(own) if one.step <= max(step - WINDOW, 0)), default=0)
            belt = own[first].state().get("belt") or {}
            losses, rate = tuple(attempt.losses), belt.get("factor", 1.0)
            return Collapse(config, step, seen, tuple(own[first:]), tuple(stored), nothing, limit, losses, every, rate)
    steps = ", ".join(str(one.step) for one in stored) or "none"
    which = "before it" if start is None else f"of step {start} before it"
    raise RunError(
        f"{run.folder} collapsed after step {found[0][1]}, and has no checkpoint {which} to replay it from (steps: "
        f"{steps}): train with a smaller training.checkpoint_every or a larger keep_last, and ask again"
    )


def attempts_of(lines: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """The losses of a run's log, cut where the seat belt went back."""
    found = [Attempt(0)]
    for line in lines:
        now, event = found[-1], line.get("event")
        if event == "rollback":
            now.failed_at = line["from_step"]
            kept = [pair for pair in now.losses if pair[0] <= line["step"]]
            found.append(Attempt(now.offset + line["from_step"] - line["step"], kept))
        elif event == "diverged":
            now.failed_at = now.failed_at or line["step"]
        elif event == "skipped":
            now.skipped.append(line["step"])
        elif "lr" in line:
            now.losses.append((line["step"], float(line["loss"])))
    return found


def windows(losses: Sequence[tuple[int, float]], every: int, watch: LossWatch) -> Iterator[tuple[int, str]]:
    """The last step of each window of logged losses, and what the watch says of it."""
    # A line may be a mean already: two or more tell how much they scatter.
    rest, size = iter(losses), max(2, min(WINDOW, 2 * WINDOW // every))
    while len(part := list(islice(rest, size))) > 1:
        yield part[-1][0], watch.look([loss for _, loss in part])


def place_of(attempt: Attempt, every: int, nothing: float) -> tuple[int, int] | None:
    """The last step before the losses were no longer healthy, and the one at which the collapse was plain."""
    watch, healthy, end = LossWatch(nothing), 0, attempt.failed_at
    for step, state in windows(attempt.losses, every, watch):
        learned = watch.best is not None and watch.best < (1 - LEARNED) * nothing
        if state == "collapsed" and learned:
            end = min(step, end or step)
            return min(healthy, end - 1), end
        if state == "healthy":
            healthy = step
    if end is None:
        return None
    first = next((step for step in attempt.skipped if step > end - 2 * WINDOW), end)
    return min(healthy, max(first - 1, 0), max(end - WINDOW, 0)), end


def unlearned(attempt: Attempt, limit: float) -> tuple[int, int] | None:
    """The places for a run that ended without having learned: it was at its best, and never so good again."""
    ends = [loss for _, loss in attempt.losses[-max(1, len(attempt.losses) // 10) :]]
    if not ends or cause_of_failure(fmean(ends), limit) is None:
        return None
    best = min(attempt.losses, key=lambda pair: pair[1])[0]
    return best, best + 2 * WINDOW


def no_collapse(run: Run, attempts: Sequence[Attempt], nothing: float) -> str:
    """Why there is nothing to ask."""
    losses = [loss for _, loss in attempts[-1].losses]
    if not losses:
        return f"{run.folder} has no losses in {run.metrics.path.name} yet: there is nothing to ask"
    ends = f"its training loss was {losses[-1]:.4g} at the end, {min(losses):.4g} at best"
    return f"{run.folder} did not collapse: {ends}, and that of predicting nothing is {nothing:.4g}"


def stored_checkpoints(run: Run) -> list[Checkpoint]:
    """All that are complete, by step."""
    store, found = run.checkpoints(), []
    for step in store.steps():
        try:
            found.append(store.load(step))
        except CheckpointError:
            continue
    return found
