"""Where a run begins: anew, at its last complete checkpoint, or at one that the user names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config.schema import Config
from .checkpoint import Checkpoint, CheckpointStore
from .run_dir import Run, RunError, check_folder, check_same_run


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to begin at, if any: one of the run's `own` folder, and `named` by the user or the last one."""

    checkpoint: Checkpoint | None = None
    own: bool = True
    named: bool = False
    store: CheckpointStore | None = None
    """The run's checkpoints, with what is known by now of damage to them."""
    found: tuple[int, ...] = ()
    """The steps that they had."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def find_start(run: Run, config: Config, resume: str | Path = "auto") -> ResumePoint:
    """Where to begin; raises, before anything is written, if the folder is not one for this run.

    `auto` goes on where the folder's run stopped, or begins one; `never` only begins one; a path names a checkpoint.
    """
    check_folder(run)
    if run.exists and resume == "never":
        raise RunError(f"{run.folder} holds a run already: choose another --out, or go on with it (--resume auto)")
    store = run.checkpoints(config.training.keep_last)
    found = tuple(store.steps())
    if run.exists:
        check_same_run(run, config)
        check_not_lost(run, found)
    if resume not in ("auto", "never"):
        return find_named(run, Path(resume), store, found)
    if found and not run.exists:
        raise RunError(
            f"{run.folder} was interrupted while it branched off from another run: give its command again with "
            "--resume CHECKPOINT, or remove the folder"
        )
    return ResumePoint(store.latest(), store=store, found=found)


def find_named(run: Run, path: Path, store: CheckpointStore, found: tuple[int, ...]) -> ResumePoint:
    """A checkpoint of the run itself, or one of another run to begin at; a run that has checkpoints keeps to those."""
    checkpoint = store.load(path)
    own = checkpoint.path.resolve().parent == store.folder.resolve()
    if run.exists and not own and found:
        raise RunError(f"{run.folder} holds a run already: choose another --out to begin one at {path}")
    return ResumePoint(checkpoint, own, named=True, store=store, found=found)


def check_not_lost(run: Run, found: tuple[int, ...]) -> None:
    """Raise if a run has a log but no checkpoint any more: beginning anew, which cuts the log, must be a decision."""
    log = run.metrics.path
    if not found and log.exists() and log.stat().st_size:
        raise RunError(
            f"{run.folder} has lost its checkpoints, but {log.name} says that it was trained: put them back to go on "
            "with it, or choose another --out to begin anew"
        )


def check_unchanged(run: Run, start: ResumePoint) -> None:
    """Raise if another process trained in the folder after the start was found, and before it was locked."""
    if tuple(run.checkpoints().steps()) != start.found:
        raise RunError(f"another process has just trained in {run.folder}: give the command again to go on from there")


def drop_later(run: Run, start: ResumePoint, store: CheckpointStore, *, metrics_size: int) -> None:
    """Drop what came after the step that a run goes on from; `metrics_size` is how long its log was then."""
    if start.named:
        # Before the log is cut: a kill in between would leave a later checkpoint without the log that led to it.
        store.discard_after(start.step)
    run.metrics.cut(metrics_size if start.own else 0)


def is_finished(config: Config, run: Run, start: ResumePoint) -> bool:
    """Whether nothing is left to do: all steps are done, and the last has the grid and the evaluation that are due."""
    steps, checkpoint = config.training.steps, start.checkpoint
    if start.step != steps or checkpoint is None:
        return start.step >= steps
    if start.own and config.training.sample_every is not None and not run.grid(steps).is_file():
        return False
    return config.evaluation.every is None or checkpoint.state().get("evaluated") == steps
