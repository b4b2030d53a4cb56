"""Which of a run's checkpoints is meant."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .run_dir import Run, RunError


def choose_checkpoint(run: Run, which: str | int = "last") -> Checkpoint:
    """The `last` checkpoint of a run, the `best` by validation loss, or that of a step; raises where there is none."""
    store = run.checkpoints()
    if which == "last":
        found = store.latest()
        reason = "has no checkpoint yet"
    elif which == "best":
        found = store.best()
        reason = (
            "has no checkpoint with a validation loss, by which the best is known: use --checkpoint last, or train "
            "with training.validate_every at steps that are saved"
        )
    else:
        return store.load(step_of(which))
    if found is None:
        raise RunError(f"{run.folder} {reason}")
    return found


def step_of(which: str | int) -> int:
    if not str(which).isdecimal():
        raise ValueError(f"--checkpoint is best, last, or the number of a step, not {which!r}")
    return int(which)
