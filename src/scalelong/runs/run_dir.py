"""A run's folder: the resolved recipe, where and with what it ran, metrics, checkpoints and samples."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..config.load import load_recipe, to_yaml
from ..config.schema import Config
from ..utils.atomic import locked, replace_text, writing
from .checkpoint import CheckpointStore

PACKAGES = ("scalelong", "torch", "diffusers", "datasets", "numpy", "safetensors")

LOCK = ".lock"
CHECKPOINTS = "checkpoints"


class RunError(ValueError):
    """A folder that cannot be used for this run; the message says why and what to do."""


class MetricsLog:
    """metrics.jsonl, one JSON object per line.

    A checkpoint records the size of the file; `cut(size)` brings the file back to it, so that a resumed run writes
    every line exactly once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line; JSON has no infinity and no NaN: they become text."""
        known = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        line = json.dumps(known, ensure_ascii=False)
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def synced_size(self) -> int:
        """The length of the file in bytes, once all of it is on the disk; 0 before its first line."""
        if not self.path.exists():
            return 0
        with writing(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut(self, size: int) -> None:
        """Drop what came after `size` bytes, a line that was written in part included."""
        if self.path.exists() and self.path.stat().st_size > size:
            with writing(self.path):
                os.truncate(self.path, size)

    def last_step(self) -> int:
        """The step of the last line, 0 if there is none."""
        lines = read_metrics(self.path) if self.path.exists() else []
        return lines[-1]["step"] if lines else 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines that were written whole."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Run:
    """The places in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config_file = folder / "config.yaml"
        self.environment_file = folder / "environment.json"
        self.metrics = MetricsLog(folder / "metrics.jsonl")
        self.samples = folder / "samples"

    def grid(self, step: int) -> Path:
        """The file of the grid of samples of a step."""
        return self.samples / f"step-{step:06d}.png"

    def checkpoints(self, keep_last: int = 3) -> CheckpointStore:
        return CheckpointStore(self.folder / CHECKPOINTS, keep_last)

    @property
    def exists(self) -> bool:
        return self.config_file.is_file()

    def config(self) -> Config:
        """The recipe that the run was started with."""
        if not self.exists:
            raise RunError(f"{self.folder} is not the folder of a run: it has no {self.config_file.name}")
        return load_recipe(self.config_file)

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from training in the folder."""
        return locked(self.folder / LOCK, busy=f"another process is training in {self.folder}")

    def starts(self) -> list[dict[str, Any]]:
        """The environment of each time that the run was begun or resumed."""
        file = self.environment_file
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []

    def begin(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Write what the run is, before its first step or when it resumes; earlier environments are kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([*self.starts(), environment], indent=1, ensure_ascii=False)
        # First what makes the folder that of a run: a kill in between leaves one that can be begun again.
        replace_text(self.config_file, to_yaml(config))
        replace_text(self.environment_file, text + "\n")


def last_precision(run: Run) -> str | None:
    """The precision of the run's last start; None if it was never started."""
    starts = run.starts()
    # Older runs call fp32 "no".
    return starts[-1]["precision"].replace("no", "fp32") if starts else None


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


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> flatten({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def environment(*, device: torch.device, processes: int, precision: str, seed: int, step: int) -> dict[str, Any]:
    """What a run that begins or resumes at `step` runs with; `precision` is fp32, bf16 or fp16."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "seed": seed,
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **versions()},
        "commit": git_commit(Path(__file__).parent),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "precision": precision,
    }


@cache
def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache  # A long process runs the code that it began with.
def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that a folder lies in, with `-dirty` if files differ from it; None outside of one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
