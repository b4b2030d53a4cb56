"""Where a run begins: at its last complete checkpoint, at a requested one, or anew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config.schema import Config, EvaluationConfig
from .checkpoint import Checkpoint, CheckpointStore
from .run_dir import Run, RunError, check_folder, flatten

# What may differ when a run resumes: nothing that a step computes depends on it.
MAY_DIFFER = {"name", "description", "data.workers", "data.memory_gb", "data.prepared"}
MAY_DIFFER |= {f"evaluation.{key}" for key in EvaluationConfig.model_fields}
MAY_DIFFER |= {
    f"training.{key}"
    for key in (
        *("steps", "log_every", "validate_every", "sample_every", "checkpoint_every"),
        *("keep_last", "max_skipped", "monitor_every", "trackers", "parallel"),
    )
}


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run begins at, None for a new run."""

    checkpoint: Checkpoint | None = None
    same_run: bool = True
    """Whether the checkpoint is one of the run itself, and not of another run that this one branches off from."""
    requested: bool = False
    """Whether the user named the checkpoint."""
    store: CheckpointStore | None = None
    """The run's checkpoints, with what is known by now of damage to them."""
    steps_on_disk: tuple[int, ...] = ()
    """The steps that had a checkpoint when this was found."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def find_resume_point(run: Run, config: Config, resume: str | Path = "auto") -> ResumePoint:
    """Where to begin; raises, before anything is written, if the folder is not one for this run.

    `auto` resumes the folder's run or begins one; `never` only begins one; a path names a checkpoint.
    """
    check_folder(run)
    if run.exists and resume == "never":
        raise RunError(f"{run.folder} holds a run already: choose another --out, or resume it (--resume auto)")
    store = run.checkpoints(config.training.keep_last)
    steps = tuple(store.steps())
    if run.exists:
        check_same_run(run, config)
        check_not_lost(run, steps)
    requested = resume not in ("auto", "never")
    if steps and not run.exists and not requested:
        raise RunError(
            f"{run.folder} was interrupted while it branched off from another run: give its command again with "
            "--resume CHECKPOINT, or remove the folder"
        )
    checkpoint = store.load(Path(resume)) if requested else store.latest()
    same_run = checkpoint is None or checkpoint.path.resolve().parent == store.folder.resolve()
    if steps and run.exists and not same_run:
        raise RunError(f"{run.folder} holds a run already: choose another --out to begin one at {resume}")
    return ResumePoint(checkpoint, same_run, requested, store, steps)


def check_same_run(run: Run, config: Config) -> None:
    """Raise if the folder's run has settings that change what a step computes."""
    before, now = flatten(run.config().model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in MAY_DIFFER]
    if changed:
        shown = ", ".join(f"{key} {before.get(key)} → {now.get(key)}" for key in changed[:4])
        raise RunError(
            f"{run.folder} holds a run with other settings ({shown}): give the same ones to resume it, "
            "or choose another --out"
        )


def check_not_lost(run: Run, steps: tuple[int, ...]) -> None:
    """Raise if a run has a log but no checkpoint any more: beginning anew, which cuts the log, must be a decision."""
    log = run.metrics.path
    if not steps and log.exists() and log.stat().st_size:
        raise RunError(
            f"{run.folder} has lost its checkpoints, but {log.name} says that it was trained: put them back to resume, "
            "or choose another --out to begin anew"
        )


def check_unchanged(run: Run, start: ResumePoint) -> None:
    """Raise if another process trained in the folder after the resume point was found and before it was locked."""
    if tuple(run.checkpoints().steps()) != start.steps_on_disk:
        raise RunError(f"another process has just trained in {run.folder}: give the command again to resume from there")


def drop_later(run: Run, start: ResumePoint, store: CheckpointStore, *, metrics_size: int) -> None:
    """Drop what came after the resume point; `metrics_size` is how long the log was then."""
    if start.requested:
        # Before the log is cut: a kill in between would leave a later checkpoint without the log that led to it.
        store.discard_after(start.step)
    run.metrics.cut(metrics_size if start.same_run else 0)


def is_finished(config: Config, run: Run, start: ResumePoint) -> bool:
    """Whether nothing is left to do: all steps are done, and the last has the grid and the evaluation that are due."""
    steps, checkpoint = config.training.steps, start.checkpoint
    if start.step != steps or checkpoint is None:
        return start.step >= steps
    if start.same_run and config.training.sample_every is not None and not run.grid(steps).is_file():
        return False
    return config.evaluation.every is None or checkpoint.state().get("evaluated") == steps
