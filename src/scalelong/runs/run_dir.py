"""A run's folder: the resolved recipe, where and with what it ran, metrics, and the checkpoint that it resumes from."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..config.build import note_start
from ..config.load import check_config, load_recipe, to_yaml
from ..config.own import keep_code, with_code_at_hand
from ..config.schema import Config, PythonConfig
from ..config.sections import EvaluationConfig
from ..utils.atomic import Files, locked, replace_text, writing
from ..utils.records import flatten, log_damage, parse_lines, read_lines
from ..utils.runtime import Rank, software
from .checkpoint import Checkpoint, CheckpointStore

logger = logging.getLogger(__name__)

LOCK = ".lock"
CHECKPOINTS = "checkpoints"

# What may differ when a run resumes: nothing that a step computes depends on it.
MAY_DIFFER = {"name", "description", "model.weights"}
MAY_DIFFER |= {f"data.{key}" for key in ("workers", "memory_gb", "prepared", "allow_paths")}
MAY_DIFFER |= {f"evaluation.{key}" for key in EvaluationConfig.model_fields}
MAY_DIFFER |= {
    f"training.{key}"
    for key in (
        *("steps", "log_every", "validate_every", "sample_every", "checkpoint_every"),
        *("keep_last", "max_skipped", "must_gain", "monitor_every", "trackers", "parallel", "seat_belt"),
    )
}


class RunError(ValueError):
    """A folder that cannot be used for this run; the message says why and what to do."""


class MetricsLog:
    """metrics.jsonl, one JSON object per line.

    A checkpoint keeps the size, the number of lines and the SHA-256 of what was written until then. `resume` brings the
    file back to that, so that a resumed run writes every line exactly once, and knows that lines are lost.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.size, self.digest = path, 0, 0, hashlib.sha256()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line; JSON has no infinity and no NaN: they become text."""
        known = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        line = (json.dumps(known, ensure_ascii=False) + "\n").encode()
        with writing(self.path), self.path.open("ab") as file:
            file.write(line)
        self._count(line)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the file, once all of it is on the disk."""
        if self.size:
            with writing(self.path):
                for path in (self.path, self.path.parent):
                    Files().sync(path)
        return {"metrics_size": self.size, "metrics_lines": self.lines, "metrics_sha256": self.digest.hexdigest()}

    def resume(self, saved: Mapping[str, Any] | None) -> str | None:
        """Drop what came after a checkpoint, or all of it; returns what is lost of what came before, if anything is."""
        damage = None if saved is None else log_damage(self.path, saved)
        if saved is not None and damage is not None:
            kept = [line for line in parse_lines(read_lines(self.path))[0] if line["step"] <= saved["step"]]
            replace_text(self.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        elif self.path.exists():
            self.cut(0 if saved is None else saved["metrics_size"])
        self.lines, self.size, self.digest = 0, 0, hashlib.sha256()
        self._count(self.path.read_bytes() if self.path.exists() else b"")
        return damage

    def cut(self, size: int) -> None:
        """Drop what came after `size` bytes, a line that was written in part included."""
        if self.path.stat().st_size > size:
            with writing(self.path):
                os.truncate(self.path, size)

    def last_step(self) -> int:
        """The step of the last line, 0 if there is none."""
        lines = read_metrics(self.path) if self.path.exists() else []
        return lines[-1]["step"] if lines else 0

    def _count(self, written: bytes) -> None:
        self.digest.update(written)
        self.lines, self.size = self.lines + written.count(b"\n"), self.size + len(written)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines that were written whole; those that are broken are left out, with a warning."""
    lines, broken = parse_lines(read_lines(path))
    if broken:
        logger.warning("%s: %d broken lines are left out", path, broken)
    return lines


class Run:
    """The places in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config_file = folder / "config.yaml"
        self.environment_file = folder / "environment.json"
        self.metrics = MetricsLog(folder / "metrics.jsonl")
        self.samples = folder / "samples"

    def __str__(self) -> str:
        """The folder as one would type it."""
        return shlex.quote(str(self.folder))

    def grid(self, step: int) -> Path:
        """The file of the grid of samples of a step."""
        return self.samples / f"step-{step:06d}.png"

    def checkpoints(self, keep_last: int = 3) -> CheckpointStore:
        return CheckpointStore(self.folder / CHECKPOINTS, keep_last)

    @property
    def exists(self) -> bool:
        return self.config_file.is_file()

    def config(self, overrides: Sequence[str] = (), *, allow_code: bool = False) -> Config:
        """The recipe that the run was started with; one that names code only for those who allow it to run."""
        if not self.exists:
            raise RunError(f"{self.folder} is not the folder of a run: it has no {self.config_file.name}")
        config = load_recipe(self.config_file, overrides)
        if isinstance(config.model, PythonConfig) and not allow_code:
            raise RunError(
                f"{self.folder} has a network of its own, and would run the code {config.model.factory}: look at it, "
                "then give --allow-code (allow_code=True)"
            )
        if isinstance(config.model, PythonConfig):
            return config.model_copy(update={"model": with_code_at_hand(config.model, self.folder / "code")})
        return config

    def note_network(self, config: Config) -> Config:
        """The recipe with what its network is made of, as it was noted when the run was begun, or is now."""
        begun = self.exists and isinstance(config.model, PythonConfig)
        return note_start(config, self.config(allow_code=True) if begun else None)

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from training in the folder."""
        return locked(self.folder / LOCK, busy=f"another process is training in {self.folder}")

    def starts(self) -> list[dict[str, Any]]:
        """The environment of each time that the run was begun or resumed."""
        file = self.environment_file
        if not file.exists():
            return []
        try:
            starts = json.loads(file.read_bytes())
            if {(type(start.get("step", 0)), type(start.get("precision", ""))) for start in starts} - {(int, str)}:
                raise TypeError("a step is no number, or a precision no text")
            return starts
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            lost = "what earlier starts ran with is lost, which no step depends on"
            logger.warning("%s is damaged (%s): %s", file, " ".join(str(error).split()), lost)
            return []

    def begin(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Write what the run is, before its first step or when it resumes; earlier environments are kept."""
        text = json.dumps([*self.starts(), environment], indent=1, ensure_ascii=False)
        # First what makes the folder that of a run: a kill in between leaves one that can be begun again.
        replace_text(self.config_file, to_yaml(config))
        replace_text(self.environment_file, text + "\n")
        if isinstance(config.model, PythonConfig):
            keep_code(config.model, self.folder / "code")


def last_precision(run: Run) -> str | None:
    """The precision of the run's last start; None if it was never started."""
    starts = run.starts()
    # Older runs call fp32 "no".
    return starts[-1].get("precision", "fp32").replace("no", "fp32") if starts else None


def check_folder(run: Run) -> None:
    """Raise, before any work is done, if the run's folder could not be written."""
    existing = next(place for place in (run.folder, *run.folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise RunError(f"{existing} is a file: choose another --out for the run")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RunError(f"{existing} is not writable: choose another --out for the run")
    # A run that was killed while it began leaves hidden files or checkpoints, but no recipe.
    names = [path.name for path in run.folder.iterdir()] if run.folder.is_dir() else []
    if not run.exists and any(not name.startswith(".") and name != CHECKPOINTS for name in names):
        raise RunError(f"{run.folder} holds other files and no run: choose a new or empty folder")


def environment(*, device: torch.device, processes: int, precision: str, seed: int, step: int) -> dict[str, Any]:
    """What a run that begins or resumes at `step` runs with; `precision` is fp32, bf16 or fp16."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "seed": seed,
        "command": sys.argv,
        **software(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "precision": precision,
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
    if run.exists:
        check_same_run(run, config, checkpoint if same_run else None)
    return ResumePoint(checkpoint, same_run, requested, store, steps)


def check_same_run(run: Run, config: Config, checkpoint: Checkpoint | None) -> None:
    """Raise if the run was trained with settings that make other steps: those of its checkpoint, or of config.yaml."""
    saved = None if checkpoint is None else checkpoint.state().get("recipe")
    bound = (
        run.config(allow_code=True)
        if saved is None
        else check_config(saved, {(): f"{run.folder}: the checkpoint's recipe"})
    )
    if not (changed := differences(bound, config)):
        return
    if saved is not None and not differences(run.config(allow_code=True), config):
        raise RunError(
            f"{run.config_file} is not what the run was trained with ({changed}): put it back, "
            "or train with it in another folder (--out)"
        )
    raise RunError(
        f"{run.folder} holds a run with other settings ({changed}): give the same ones to resume it, "
        "or choose another --out"
    )


def differences(one: Config, other: Config) -> str:
    """The first settings that make other steps, with both values; empty if there are none."""
    before, now = flatten(one.model_dump(mode="json")), flatten(other.model_dump(mode="json"))
    for settings in (before, now):
        if "model.factory" in settings:  # Its file may lie elsewhere; what is in it is another setting.
            settings["model.factory"] = Path(settings["model.factory"]).name
    # A learning rate that falls until the last step depends on which that is.
    free = MAY_DIFFER if other.optim.schedule == "constant" else MAY_DIFFER - {"training.steps"}
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in free]
    return ", ".join(f"{key} {before.get(key)} → {now.get(key)}" for key in changed[:4])


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


def drop_later(run: Run, start: ResumePoint, store: CheckpointStore) -> str | None:
    """Drop what came after the resume point; returns what is lost of the log before it, if anything is."""
    if start.requested:
        # Before the log is cut: a kill in between would leave a later checkpoint without the log that led to it.
        store.discard_after(start.step)
    return run.metrics.resume(start.checkpoint.state() if start.checkpoint is not None and start.same_run else None)


def is_finished(config: Config, run: Run, start: ResumePoint) -> bool:
    """Whether nothing is left to do: all steps are done, and the last has the grid and the evaluation that are due."""
    steps, checkpoint = config.training.steps, start.checkpoint
    if start.step < steps or checkpoint is None:
        return False
    said = checkpoint.state()
    if start.step == steps:
        lacks_grid = config.training.sample_every is not None and not run.grid(steps).is_file()
        if (start.same_run and lacks_grid) or (config.evaluation.every is not None and said.get("evaluated") != steps):
            return False
    if start.same_run and Rank.here().index == 0 and (lost := log_damage(run.metrics.path, said)):
        logger.warning("%s: %s; the weights are whole", run.folder, lost)
    return True
