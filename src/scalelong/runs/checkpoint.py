"""Checkpoints that lose nothing: complete or absent, checksummed, and never a pickle.

A checkpoint is a folder `step-NNNNNN` with one safetensors file per group of tensors, `state.json` and `manifest.json`.
It is written under a temporary name, synced and renamed; only then are older ones removed.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..utils.atomic import (
    NO_SPACE,
    Damaged,
    Files,
    advice_for,
    describe,
    free_space,
    human_size,
    import_safetensors,
    to_json,
)
from .manifest import (
    GROUP_NAME,
    MANIFEST,
    STATE,
    Checkpoint,
    CheckpointError,
    Manifest,
    check_json,
    read_manifest,
    verify,
)

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore"]

logger = logging.getLogger(__name__)

Groups = Mapping[str, Mapping[str, Tensor]]

# A killed save leaves `.tmp-…` behind; one killed while it replaced a step may leave `.replaced-step-…` too.
TEMPORARY = ".tmp-"
REPLACED = ".replaced-"
FOLDER_NAME = re.compile(rf"({re.escape(REPLACED)})?step-(\d{{6,}})")


class Folder(NamedTuple):
    """A folder of the store; of two, the larger is to be preferred."""

    step: int
    in_place: bool
    path: Path


class CheckpointStore:
    """The checkpoints of one run: the last `keep_last`, and the one with the lowest metric.

    With several processes one of them saves and all may read; sharded tensors are gathered by the caller.
    """

    def __init__(self, folder: str | Path, keep_last: int = 3, *, files: Files | None = None) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}: nothing would be left to resume from")
        self.folder = Path(folder)
        self.keep_last = keep_last
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
            self._write(temporary, step, tensors, state, finite_or_none(metric))
            self._publish(temporary, final)
        except OSError as error:
            raise CheckpointError(self._explain(step, tensors, error)) from error
        finally:
            self._tidy("remove", self._remove, temporary)
        self._damaged.discard(final)
        self._prune(step)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, None if there are none; damaged ones are skipped with a warning.

        Raises CheckpointError if all are damaged: starting anew must be a decision.
        """
        return self._first_complete(sorted(self._folders(), reverse=True))

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the lowest metric, the newest of equals; None if none has a metric."""
        with_metric = [(folder, m.metric) for folder, m in self._manifests() if m.metric is not None]
        with_metric.sort(key=lambda pair: (pair[1], -pair[0].step))
        return self._first_complete([folder for folder, _ in with_metric])

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
        return sorted({folder.step for folder in self._folders()})

    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints of later steps, for a run that goes on from `step`; returns what was removed."""
        later = [folder for folder in self._folders() if folder.step > step]
        for folder in later:
            self._discard(folder.path)
        return sorted({folder.step for folder in later})

    def _write(self, folder: Path, step: int, tensors: Groups, state: Mapping[str, Any], metric: float | None) -> None:
        self.files.make_folder(folder)
        for group, values in tensors.items():
            self.files.write_tensors(folder / f"{group}.safetensors", values)
        self.files.write_bytes(folder / STATE, to_json(state))
        written = {path.name: describe(path) for path in sorted(folder.iterdir())}
        self.files.write_bytes(folder / MANIFEST, Manifest(step, metric, written).to_json())
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
                self._tidy("restore", lambda path: self.files.rename(aside, path), final)
            raise
        self.files.sync(self.folder)
        self._tidy("remove", self._remove, aside)

    def _prune(self, newest: int) -> None:
        """Remove what is neither among the last ones nor the best; damaged folders and later steps are left alone."""
        complete = {
            folder.step: (folder.path, manifest.metric)
            for folder, manifest in self._manifests()
            if folder.in_place and folder.step <= newest and folder.path not in self._damaged
        }
        metrics = {step: metric for step, (_, metric) in complete.items() if metric is not None}
        best = min(metrics, key=lambda step: (metrics[step], -step), default=None)
        for step in sorted(complete)[: -self.keep_last]:
            if step != best:
                self._discard(complete[step][0])

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint; renamed first, so that a removal killed halfway does not look like damage."""
        doomed = self.folder / f"{TEMPORARY}removed-{path.name}"
        self._tidy("remove", lambda source: self.files.rename(source, doomed), path)
        self._tidy("remove", self._remove, doomed)

    def _clean_up(self) -> None:
        """Remove what killed saves left behind; a checkpoint that had stepped aside for one takes its place again."""
        for path in sorted(self.folder.iterdir()):
            place = self.folder / path.name.removeprefix(REPLACED)
            if path.name.startswith(TEMPORARY) or (place != path and place.exists()):
                self._tidy("remove", self._remove, path)
            elif place != path:
                self._tidy("restore", lambda aside, place=place: self.files.rename(aside, place), path)

    def _remove(self, path: Path) -> None:
        if path.exists():
            self.files.remove(path)

    def _tidy(self, verb: str, action: Callable[[Path], None], path: Path) -> None:
        """Run an action whose failure must neither fail a save that succeeded nor hide why one failed."""
        try:
            action(path)
        except OSError as error:
            logger.warning("could not %s %s: %s", verb, path, error)

    def _folders(self) -> Iterator[Folder]:
        try:
            paths = list(self.folder.iterdir()) if self.folder.is_dir() else []
        except OSError as error:
            raise CheckpointError(f"cannot read the checkpoints in {self.folder}: {error.strerror}") from error
        for path in paths:
            match = FOLDER_NAME.fullmatch(path.name)
            if match and path.is_dir():
                yield Folder(int(match[2]), match[1] is None, path)

    def _manifests(self) -> Iterator[tuple[Folder, Manifest]]:
        """Folders whose manifest can be read; their files are not hashed."""
        for folder in self._folders():
            try:
                yield folder, read_manifest(folder.path)
            except Damaged:
                continue

    def _first_complete(self, folders: list[Folder]) -> Checkpoint | None:
        reasons = []
        for folder in folders:
            try:
                return verify(folder.path, folder.step)
            except Damaged as damage:
                self._damaged.add(folder.path)
                reasons.append(f"{folder.path.name}: {damage}")
                logger.warning("checkpoint %s is damaged and was skipped: %s", folder.path, damage)
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is complete ({'; '.join(reasons)}). "
                "Restore one from a copy, or move the folder away to start anew."
            )
        return None

    def _explain(self, step: int, tensors: Groups, error: OSError) -> str:
        needed = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
        free = free_space(self.folder)
        space = f"it needs {human_size(needed)}" + ("" if free is None else f", {human_size(free)} are free")
        fewer = "Free some space or keep fewer checkpoints, then resume."
        return (
            f"could not save the checkpoint of step {step} in {self.folder}: {error.strerror or error}; {space}. "
            f"Older checkpoints are intact. {fewer if error.errno in NO_SPACE else advice_for(error.errno)}"
        )


def finite_or_none(metric: float | None) -> float | None:
    """A metric that is not a number is never the best one."""
    return float(metric) if metric is not None and math.isfinite(metric) else None


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
    import_safetensors()


def check_tensor(name: str, tensor: Tensor) -> None:
    if hasattr(tensor, "full_tensor"):
        raise ValueError(
            f"{name} is one process's shard of a tensor. Gather it on every process first, e.g. with "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(f"{name} is a {tensor.layout} tensor on {tensor.device}; only dense ones hold values to keep")
