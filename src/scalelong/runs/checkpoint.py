"""Checkpoints that lose nothing: complete or absent, checksummed, and never a pickle.

A checkpoint is a folder `step-NNNNNN` with one safetensors file per group of tensors, `state.json`, and a manifest
that lists them with their sizes and SHA-256; what it does not list is never opened. The folder is written under a
temporary name, synced and renamed; only then are older ones removed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..utils import atomic
from ..utils.atomic import (
    Damaged,
    Files,
    check_json,
    check_tensor,
    describe_files,
    import_safetensors,
    read_signed,
    read_tensors,
    signed,
    to_json,
    verify_files,
)

logger = logging.getLogger(__name__)

Groups = Mapping[str, Mapping[str, Tensor]]

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
FILE_NAME = re.compile(rf"{GROUP_NAME.pattern}\.safetensors|{re.escape(STATE)}")

# A killed save leaves `.tmp-…` behind; one killed while it replaced a step may leave `.replaced-step-…` too.
TEMPORARY = ".tmp-"
REPLACED = ".replaced-"
FOLDER_NAME = re.compile(rf"({re.escape(REPLACED)})?step-(\d{{6,}})")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what, where, and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its manifest describes it; its contents are read when asked for."""

    path: Path
    step: int
    metric: float | None
    files: Mapping[str, Sequence[Any]]
    """By name, the size in bytes and the SHA-256."""

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(name.removesuffix(".safetensors") for name in self.files if name != STATE)

    def tensors(self, group: str) -> dict[str, Tensor]:
        """The tensors of one group, by name, on the CPU."""
        if group not in self.groups:
            raise CheckpointError(f"{self.path} has no group {group!r}; it has {', '.join(self.groups) or 'none'}")
        try:
            return read_tensors(self.path / f"{group}.safetensors")
        except Damaged as damage:
            raise self.damaged(damage) from damage

    def state(self) -> dict[str, Any]:
        """What it says besides its tensors."""
        try:
            content = json.loads((self.path / STATE).read_bytes())
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"{STATE} is no JSON ({error})") from error
        if not isinstance(content, dict):
            raise self.damaged(f"{STATE} holds a {type(content).__name__}, not keys and values")
        return content

    def damaged(self, reason: object) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.path} is damaged: {reason}. Resume from another one.")


class CheckpointStore:
    """The checkpoints of one run: the last `keep_last`, and the one with the lowest metric.

    With several processes one of them saves and all may read; sharded tensors are gathered by the caller.
    """

    def __init__(self, folder: str | Path, keep_last: int = 3, *, files: Files | None = None) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}: nothing would be left to resume from")
        self.folder = Path(folder)
        self.keep_last = keep_last
        import_safetensors()  # Where it is missing, before anything is trained.
        self.files = files or Files()
        self._damaged: set[Path] = set()

    def save(self, step: int, tensors: Groups, state: Mapping[str, Any], metric: float | None = None) -> Path:
        """Write the checkpoint of a step, then remove those no longer needed; returns its folder.

        `tensors` are named groups of named tensors, `state` is whatever JSON keeps exactly. Raises CheckpointError, and
        leaves older checkpoints as they were, when the disk refuses.
        """
        check_request(step, tensors, state)
        final = self.folder / f"step-{step:06d}"
        temporary = self.folder / f"{TEMPORARY}{final.name}-{os.getpid()}"
        try:
            self.files.make_folder(self.folder)
            self._clean_up()
            self._write(temporary, step, tensors, state, metric)
            self._publish(temporary, final)
        except OSError as error:
            raise CheckpointError(self._explain(step, tensors, error)) from error
        finally:
            self._tidy(self.files.remove, temporary)
        self._damaged.discard(final)
        self._prune(step)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, None if there are none; damaged ones are skipped with a warning.

        Raises CheckpointError if all are damaged: starting anew must be a decision.
        """
        return self._first_complete(reversed(self._folders()))

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the lowest metric, the newest of equals; None if none has a metric."""
        return self._first_complete(found.path for found in best_first(self._listed()))

    def load(self, which: int | str | Path) -> Checkpoint:
        """The checkpoint of a step, or in a folder given by its path; raises CheckpointError if it is not complete."""
        path = self.folder / f"step-{which:06d}" if isinstance(which, int) else Path(which)
        if not path.is_dir():
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"there is no checkpoint {path}. Steps in {self.folder}: {known}.")
        try:
            return verify(path)
        except Damaged as damage:
            raise CheckpointError(f"checkpoint {path} is damaged: {damage}. Resume from another one.") from damage

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, complete or damaged, in ascending order."""
        return sorted({step_of(path) for path in self._folders()})

    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints of later steps, for a run that resumes from `step`; returns what was removed."""
        later = [path for path in self._folders() if step_of(path) > step]
        for path in later:
            self._discard(path)
        return sorted({step_of(path) for path in later})

    def _write(self, folder: Path, step: int, tensors: Groups, state: Mapping[str, Any], metric: float | None) -> None:
        self.files.make_folder(folder)
        for group, values in tensors.items():
            self.files.write_tensors(folder / f"{group}.safetensors", values)
        self.files.write_bytes(folder / STATE, to_json(state))
        written = describe_files(sorted(folder.iterdir()))
        self.files.write_bytes(folder / MANIFEST, manifest_of(step, metric, written))
        for name in (*written, MANIFEST):
            self.files.sync(folder / name)
        self.files.sync(folder)

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give a finished checkpoint its name; one that has the name already steps aside until then."""
        aside = self.folder / f"{REPLACED}{final.name}"
        replaces = final.exists()
        if replaces:
            self.files.rename(final, aside)
        try:
            self.files.rename(temporary, final)
        except OSError:
            if replaces:
                self._tidy(self.files.rename, aside, final)
            raise
        self.files.sync(self.folder)
        self._tidy(self.files.remove, aside)

    def _clean_up(self) -> None:
        """Remove what killed saves left behind; a checkpoint that had stepped aside for one takes its place again."""
        for path in sorted(self.folder.iterdir()):
            place = self.folder / path.name.removeprefix(REPLACED)
            if path.name.startswith(TEMPORARY) or (place != path and place.exists()):
                self._tidy(self.files.remove, path)
            elif place != path:
                self._tidy(self.files.rename, path, place)

    def _prune(self, newest: int) -> None:
        """Remove what is neither among the last ones nor the best; damaged folders and later steps are left alone."""
        listed = [found for found in self._listed() if found.step <= newest and found.path not in self._damaged]
        complete = [found for found in listed if not found.path.name.startswith(REPLACED)]
        best = best_first(complete)[:1]
        for found in complete[: -self.keep_last]:
            if found not in best:
                self._discard(found.path)

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint; renamed first, so that a removal killed halfway does not look like damage."""
        doomed = self.folder / f"{TEMPORARY}removed-{path.name}"
        self._tidy(self.files.rename, path, doomed)
        self._tidy(self.files.remove, doomed)

    def _tidy(self, operation: Callable[..., None], *paths: Path) -> None:
        """Remove or rename; a failure must neither fail a save that succeeded nor hide why one failed."""
        try:
            operation(*paths)
        except OSError as error:
            logger.warning("could not %s %s: %s", operation.__name__, paths[0], error)

    def _folders(self) -> list[Path]:
        """The folders of checkpoints, complete or damaged, by step; of two of a step, the one in place comes last."""
        try:
            paths = list(self.folder.iterdir()) if self.folder.is_dir() else []
        except OSError as error:
            raise CheckpointError(f"cannot read the checkpoints in {self.folder}: {error.strerror}") from error
        found = [path for path in paths if FOLDER_NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: (step_of(path), path.name))

    def _listed(self) -> list[Checkpoint]:
        """The checkpoints whose manifest can be read, by step; their files are not hashed."""
        found = []
        for path in self._folders():
            with suppress(Damaged):
                found.append(read_manifest(path))
        return found

    def _first_complete(self, folders: Iterable[Path]) -> Checkpoint | None:
        reasons = []
        for path in folders:
            try:
                return verify(path)
            except Damaged as damage:
                self._damaged.add(path)
                reasons.append(f"{path.name}: {damage}")
                logger.warning("checkpoint %s is damaged and was skipped: %s", path, damage)
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is complete ({'; '.join(reasons)}). "
                "Restore one from a copy, or move the folder away to start anew."
            )
        return None

    def _explain(self, step: int, tensors: Groups, error: OSError) -> str:
        space, advice = "", atomic.advice_for(error)
        if error.errno in atomic.NO_SPACE:
            needed = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
            space = (
                f"; it needs {atomic.human_size(needed)}, {atomic.human_size(atomic.free_space(self.folder))} are free"
            )
            advice = "Free some space or keep fewer checkpoints, then resume."
        return (
            f"could not save the checkpoint of step {step} in {self.folder}: {error.strerror or error}{space}. "
            f"Older checkpoints are intact. {advice}"
        )


def step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def best_first(found: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Those that have a metric: the lowest first, of equals the newest, and the one in place."""
    with_metric = [one for one in found if one.metric is not None]
    return sorted(with_metric, key=lambda one: (-(one.metric or 0.0), one.step, one.path.name), reverse=True)


def manifest_of(step: int, metric: float | None, files: Mapping[str, Sequence[Any]]) -> bytes:
    """A manifest; a metric that is not a number is never the best one, and is left out."""
    metric = float(metric) if metric is not None and math.isfinite(metric) else None
    entries = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()}
    return signed({"format": FORMAT, "step": step, "metric": metric, "files": entries})


def read_manifest(folder: Path) -> Checkpoint:
    """The checkpoint that a folder's manifest describes; raises Damaged if it is not one that a save writes there."""
    content = read_signed(folder / MANIFEST)
    if content.get("format") != FORMAT:
        raise Damaged(f"{MANIFEST} is of another version of scalelong: its format is not {FORMAT}")
    files = {name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
    strange = [name for name in files if not FILE_NAME.fullmatch(name)]
    if strange or STATE not in files:
        raise Damaged(f"{MANIFEST} lists {strange[0]!r}, which no save writes" if strange else f"{STATE} is not listed")
    if FOLDER_NAME.fullmatch(folder.name) and step_of(folder) != content["step"]:
        raise Damaged(f"{MANIFEST} is of step {content['step']}")
    return Checkpoint(folder, content["step"], content["metric"], files)


def verify(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, every checksum compared; raises Damaged with the reason."""
    found = read_manifest(folder)
    verify_files(folder, found.files)
    return found


def check_request(step: int, tensors: Groups, state: Mapping[str, Any]) -> None:
    """Raise before the disk is touched if something could not be kept exactly."""
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    for group, values in tensors.items():
        if not GROUP_NAME.fullmatch(group):
            raise ValueError(f"a group is a file's name: use letters, digits, - and _, not {group!r}")
        for name, tensor in values.items():
            check_tensor(f"{group}: {name}", tensor)
    check_json(state, "state")
