"""What makes a folder a complete checkpoint: its manifest, and how it is verified.

The manifest lists every file with its size and SHA-256, and carries a checksum of its own. Nothing that it does not
list is opened, and it can only list safetensors files and `state.json` beside it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..utils.atomic import Damaged, read_tensors, to_json, verify_file

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
FILE_NAME = re.compile(rf"{GROUP_NAME.pattern}\.safetensors|{re.escape(STATE)}")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what, where, and what to do."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's files should be: for each name, its size in bytes and its SHA-256."""

    step: int
    metric: float | None
    files: Mapping[str, tuple[int, str]]

    def to_json(self) -> bytes:
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        content = {"format": FORMAT, "step": self.step, "metric": self.metric, "files": files}
        return to_json(content | {"sha256": hashlib.sha256(to_json(content)).hexdigest()})


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose checksums were verified; its contents are read when asked for."""

    step: int
    path: Path
    metric: float | None
    groups: tuple[str, ...]

    def tensors(self, group: str) -> dict[str, Tensor]:
        """The tensors of one group, by name, on the CPU."""
        if group not in self.groups:
            raise CheckpointError(f"{self.path} has no group {group!r}; it has {', '.join(self.groups) or 'none'}")
        return read_tensors(self.path / f"{group}.safetensors")

    def state(self) -> dict[str, Any]:
        return json.loads((self.path / STATE).read_bytes())


def check_json(value: Any, where: str) -> None:
    """Raise unless JSON keeps the value exactly: no tuples, no number as a key, no tensors."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keeps only text keys, use {str(key)!r}")
            check_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which JSON does not keep. "
            "Use numbers, text, lists and dicts; tensors go into a group."
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; raises Damaged if it is missing, altered, or not what a save writes."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        manifest = parse_manifest(json.loads(raw))
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not a manifest ({error})") from error
    # Compared as bytes, so that a change anywhere is seen, even one that a parser forgives.
    if manifest.to_json() != raw:
        raise Damaged(f"{MANIFEST} does not match its checksum")
    return manifest


def parse_manifest(content: Any) -> Manifest:
    """Build a manifest from JSON; raises ValueError on anything unexpected."""
    match content:
        case {"format": int(version)} if version != FORMAT:
            raise ValueError(f"format {version} is not {FORMAT}; it takes another version of scalelong to read it")
        case {"step": int(step), "metric": int() | float() | None as metric, "files": dict(files)}:
            return Manifest(step, metric, {name: parse_file(name, entry) for name, entry in files.items()})
    raise ValueError("step, metric or files are missing")


def parse_file(name: str, entry: Any) -> tuple[int, str]:
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"it lists {name!r}, which no save writes")
    match entry:
        case {"bytes": int(size), "sha256": str(digest)}:
            return size, digest
    raise ValueError(f"{name} has no size and checksum")


def verify(folder: Path, step: int | None = None) -> Checkpoint:
    """The checkpoint in a folder, every checksum compared; raises Damaged with the reason."""
    manifest = read_manifest(folder)
    if step not in (None, manifest.step):
        raise Damaged(f"{MANIFEST} is of step {manifest.step}")
    if STATE not in manifest.files:
        raise Damaged(f"{STATE} is not listed in {MANIFEST}")
    for name, expected in manifest.files.items():
        try:
            verify_file(folder / name, *expected)
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error
    groups = tuple(name.removesuffix(".safetensors") for name in manifest.files if name != STATE)
    return Checkpoint(manifest.step, folder, manifest.metric, groups)
