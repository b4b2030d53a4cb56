"""A run's folder: the resolved recipe, where and with what it ran, metrics, checkpoints and samples."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..config.load import RecipeError, parse_recipe, to_yaml
from ..config.schema import Config, EvaluationConfig
from ..utils.atomic import replace_text
from .checkpoint import CheckpointStore
from .metrics import MetricsLog

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PACKAGES = ("scalelong", "torch", "accelerate", "diffusers", "datasets", "numpy", "safetensors")

LOCK = ".lock"
CHECKPOINTS = "checkpoints"

# What may differ when a run goes on: nothing that a step computes depends on it.
FREE = {"name", "description", "data.workers", "data.memory_gb", "data.prepared"} | {
    f"training.{key}"
    for key in (
        *("steps", "log_every", "validate_every", "sample_every", "checkpoint_every"),
        *("keep_last", "max_skipped", "monitor_every", "trackers", "parallel"),
    )
}
FREE |= {f"evaluation.{key}" for key in EvaluationConfig.model_fields}


class RunError(ValueError):
    """A folder that cannot be used for this run; the message says why and what to do."""


@dataclass(frozen=True)
class Run:
    """The places in a run's folder."""

    folder: Path

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def environment_file(self) -> Path:
        return self.folder / "environment.json"

    @property
    def samples(self) -> Path:
        return self.folder / "samples"

    @property
    def metrics(self) -> MetricsLog:
        return MetricsLog(self.folder / "metrics.jsonl")

    def checkpoints(self, keep_last: int = 3) -> CheckpointStore:
        return CheckpointStore(self.folder / CHECKPOINTS, keep_last)

    @property
    def exists(self) -> bool:
        return self.config_file.is_file()

    def config(self) -> Config:
        """The recipe that the run was started with."""
        if not self.exists:
            raise RunError(f"{self.folder} is not the folder of a run: it has no {self.config_file.name}")
        try:
            return parse_recipe(self.config_file.read_text(encoding="utf-8"), file=str(self.config_file))
        except UnicodeDecodeError as error:
            raise RecipeError(f"{self.config_file} is not text in UTF-8") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in the folder; the system lets go of it when this one ends in any way."""
        if fcntl is None:
            yield
            return
        is_new = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(
                    f"another process is training in {self.folder}: wait for it, or stop it first"
                ) from error
            try:
                yield
            finally:
                if is_new and os.listdir(self.folder) == [LOCK]:
                    shutil.rmtree(self.folder)  # Nothing was begun, and nothing stays.

    def begin(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Write what a run is, before its first step or when it goes on; the first environment is kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        starts = json.loads(self.environment_file.read_text(encoding="utf-8")) if self.environment_file.exists() else []
        text = json.dumps([*starts, environment], indent=1, ensure_ascii=False)
        # First what makes the folder that of a run: a kill in between leaves one that can be begun again.
        replace_text(self.config_file, to_yaml(config))
        replace_text(self.environment_file, text + "\n")


def last_precision(run: Run) -> str | None:
    """The precision of the run's last start, as Accelerate calls it; None if there was none."""
    try:
        return json.loads(run.environment_file.read_text(encoding="utf-8"))[-1]["precision"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def check_folder(run: Run) -> None:
    """Raise, before any work is done, if the run's folder could not be written."""
    existing = next(place for place in (run.folder, *run.folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise RunError(f"{existing} is a file: choose another --out for the run")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RunError(f"{existing} is not writable: choose another --out for the run")
    if run.folder.is_dir() and not run.exists and any(map(is_foreign, run.folder.iterdir())):
        raise RunError(f"{run.folder} holds other files and no run: choose a new or empty folder")


def is_foreign(path: Path) -> bool:
    """Whether something in a folder without a recipe cannot have been left by a run that was killed while it began."""
    return not path.name.startswith(".") and path.name != CHECKPOINTS


def check_same_run(run: Run, config: Config) -> None:
    """Raise if the folder's run has settings that change what a step computes."""
    before, now = flatten(run.config().model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in FREE]
    if changed:
        shown = ", ".join(f"{key} {before.get(key)} → {now.get(key)}" for key in changed[:4])
        raise RunError(
            f"{run.folder} holds a run with other settings ({shown}): give the same ones to go on with it, "
            "or another --out"
        )


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> flatten({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def environment(accelerator: Any, *, seed: int, step: int) -> dict[str, Any]:
    """What a run, or its continuation from `step`, ran with."""
    device: torch.device = accelerator.device
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "seed": seed,
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **versions()},
        "commit": git_commit(Path(__file__).parent),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "precision": accelerator.mixed_precision,
    }


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that a folder lies in, with `-dirty` if files differ from it; None outside of one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
