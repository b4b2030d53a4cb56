"""The folder of prepared data: shards, what is known of each, and the index that makes it complete.

    index.json                   what was asked for and found; when all is done, every file with its SHA-256
    train-00000.safetensors      some rows
    train-00000.json             the entry of that file, until the index has it
    validation-00000.safetensors
    empty.safetensors            the features of the empty caption

Every file is written under a temporary name, synced and renamed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..utils.atomic import Damaged, Files, atomic_write, describe, to_json, verify_file
from .errors import DataError
from .facts import Facts, difference

FORMAT = 1
INDEX = "index.json"
EMPTY = "empty"


@dataclass(frozen=True)
class Entry:
    """A finished shard: its file, how many rows are in it, and those that could not be read, with the reasons."""

    bytes: int
    sha256: str
    rows: int
    broken: Mapping[str, str]


@dataclass(frozen=True)
class Index:
    """What the folder was prepared for; `entries` by name, None while shards are missing."""

    facts: Facts
    entries: Mapping[str, Entry] | None


class PreparedFolder:
    """Reads and writes the files of one folder; several processes may, each its own shards."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.left_behind: list[Path] = []

    def shard(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"

    def index(self) -> Index | None:
        """The index; None if there is none, or it is damaged and all must be done again."""
        try:
            content = read_signed(self.path / INDEX)
        except (FileNotFoundError, Damaged):
            return None
        if content.get("format") != FORMAT:
            raise DataError(f"{self.path} was prepared by another version of scalelong: remove it, and prepare it anew")
        entries = content["entries"]
        parsed = None if entries is None else {name: Entry(**entry) for name, entry in entries.items()}
        return Index(content["facts"], parsed)

    def begin(self, facts: Facts) -> Index:
        """Open the folder for these facts, or make it; raises if it holds something else."""
        self.left_behind = list(self.path.glob(".tmp-*"))
        index = self.index()
        if index is not None:
            self.check(index.facts, facts, "choose another --out, or remove it first")
            return index
        if self.path.is_dir() and not (self.path / INDEX).exists() and any(self._strangers()):
            raise DataError(f"{self.path} holds other files and no prepared data: choose a new or empty folder")
        Files().make_folder(self.path)
        self._write_index(facts, None)
        return Index(facts, None)

    def check(self, before: Facts, now: Facts, advice: str) -> None:
        differs = difference(before, now)
        if differs is not None:
            raise DataError(f"{self.path} was prepared for {differs}: {advice}")

    def add(self, name: str, tensors: Mapping[str, Tensor], *, rows: int, broken: Mapping[str, str]) -> Entry:
        """Write a shard, and then that it is finished."""
        atomic_write(self.shard(name), lambda path: Files().write_tensors(path, tensors))
        entry = Entry(*describe(self.shard(name)), rows, dict(broken))
        self._write_signed(self._entry_file(name), asdict(entry))
        return entry

    def entry(self, name: str, index: Index) -> Entry | None:
        """What is known of a finished shard: the latest word is beside it, else in the index."""
        try:
            return Entry(**read_signed(self._entry_file(name)))
        except (FileNotFoundError, Damaged):
            return None if index.entries is None else index.entries.get(name)

    def verified(self, name: str, index: Index) -> Entry | None:
        """The entry of a shard that is finished and whole; None if it must be made, or made again."""
        entry = self.entry(name, index)
        try:
            if entry is not None:
                verify_file(self.shard(name), entry.bytes, entry.sha256)
        except Damaged:
            return None
        return entry

    def finish(self, facts: Facts, entries: Mapping[str, Entry]) -> None:
        """Write the index that makes the folder complete; what killed writers left behind before goes."""
        self._write_index(facts, entries)
        for name in entries:
            self._entry_file(name).unlink(missing_ok=True)
        # Newer ones are those of processes that are still repairing their shards.
        for path in self.left_behind:
            path.unlink(missing_ok=True)

    def tidy(self, names: Sequence[str]) -> None:
        """Remove the entries that a finished index has already."""
        index = self.index()
        if index is None or index.entries is None:
            return
        for name in names:
            if self.entry(name, index) == index.entries.get(name):
                self._entry_file(name).unlink(missing_ok=True)

    def finished_names(self) -> set[str]:
        """The shards that have an entry beside them."""
        return {path.stem for path in self.path.glob("*.json") if path.name != INDEX}

    def _strangers(self) -> list[Path]:
        # Another process may be writing the index just now.
        return [path for path in self.path.iterdir() if not path.name.startswith(".")]

    def _entry_file(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def _write_index(self, facts: Facts, entries: Mapping[str, Entry] | None) -> None:
        plain = None if entries is None else {name: asdict(entry) for name, entry in entries.items()}
        self._write_signed(self.path / INDEX, {"format": FORMAT, "facts": facts, "entries": plain})

    def _write_signed(self, path: Path, content: dict[str, Any]) -> None:
        atomic_write(path, lambda temporary: Files().write_bytes(temporary, signed(content)))


def signed(content: dict[str, Any]) -> bytes:
    """JSON with a checksum of its own in it."""
    return to_json(content | {"checksum": hashlib.sha256(to_json(content)).hexdigest()})


def read_signed(path: Path) -> dict[str, Any]:
    """The content of such a file; raises Damaged if it is not as it was written."""
    raw = path.read_bytes()
    try:
        content: dict[str, Any] = json.loads(raw)
        del content["checksum"]
        whole = signed(content) == raw
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name} is not what was written ({error})") from error
    if not whole:
        raise Damaged(f"{path.name} does not match its checksum")
    return content
