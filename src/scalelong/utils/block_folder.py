"""Numbered blocks that several processes fill: the one store behind prepared data, features, statistics and samples.

    index.json               what all blocks depend on; once all are there, the entry of each with its files' SHA-256
    block-00000.safetensors  what is in a block is a function of its number and of what is in the index
    block-00000.json         the entry of that block, until the index has it

A block counts once its entry is there, so a killed process costs no more than the block that it was making.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .atomic import Damaged, Files, atomic_write, describe_files, read_signed, verify_files, write_signed
from .runtime import SINGLE, Rank

FORMAT = 2
INDEX = "index.json"

Fingerprint = dict[str, Any]
"""What a result depends on, by name; only with equal ones are two results the same."""
Progress = Callable[[float, int], None]
"""Called with how many rows are done, and of how many."""
MakeBlock = Callable[[str, range, Callable[[float], None]], Any]
"""Adds the block of a name, with these rows, to the folder, and calls its last argument with the share that is done."""


class BlockError(ValueError):
    """A folder that holds something else; the message says what, and what to do."""


@dataclass(frozen=True)
class Entry:
    """A finished block: its files with their sizes and SHA-256, its rows, and those that could not be read, and why."""

    files: Mapping[str, Sequence[Any]]
    rows: int
    broken: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


@dataclass(frozen=True)
class Index:
    """What a folder was made for; `entries` by the block's name, None while blocks are missing."""

    fingerprint: Fingerprint
    entries: Mapping[str, Entry] | None


class BlockFolder:
    """Reads and writes the blocks of one folder; several processes may, each its own blocks."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.left_behind: list[Path] = []

    def shard(self, name: str) -> Path:
        """The file of a block that holds tensors."""
        return self.path / f"{name}.safetensors"

    def index(self) -> Index | None:
        """The index; None if there is none, or it is damaged and all must be done again."""
        return read_index(self.path / INDEX)

    def begin(self, fingerprint: Fingerprint, *, ignore: Collection[str] = ()) -> Index:
        """Open the folder, or make it; raises if it holds something else. What is in `ignore` may differ."""
        self.left_behind = list(self.path.glob(".tmp*"))
        index = self.index()
        if index is not None:
            check_fingerprint(self.path, index.fingerprint, fingerprint, ignore)
            return index
        strangers = [path for path in self.path.glob("*") if not path.name.startswith(".")]
        if strangers and not (self.path / INDEX).exists():
            raise BlockError(f"{self.path} holds other files: choose a new or empty folder")
        return write_index(self.path / INDEX, Index(fingerprint, None))

    def add(
        self, name: str, tensors: Mapping[str, Tensor], *, rows: int, broken: Mapping[str, str] | None = None
    ) -> Entry:
        """Write a block of tensors, and then that it is finished."""
        atomic_write(self.shard(name), lambda path: Files().write_tensors(path, tensors))
        return self.add_files(name, [self.shard(name)], rows=rows, broken=broken)

    def add_files(
        self, name: str, paths: Iterable[Path], *, rows: int, broken: Mapping[str, str] | None = None
    ) -> Entry:
        """Write that a block is finished, whose files are in the folder."""
        entry = Entry(describe_files(paths), rows, dict(broken or {}))
        write_signed(self._entry_file(name), asdict(entry))
        return entry

    def entry(self, name: str, index: Index) -> Entry | None:
        """What is known of a finished block: the latest word is beside it, else in the index."""
        try:
            return Entry(**read_signed(self._entry_file(name)))
        except Damaged:
            return None if index.entries is None else index.entries.get(name)

    def verify(self, entry: Entry, *, hashed: bool = True) -> None:
        """Raise Damaged if a block's files are not as they were written; their sizes alone are quicker to compare."""
        verify_files(self.path, entry.files, hashed=hashed)

    def verified(self, name: str, index: Index) -> Entry | None:
        """The entry of a block that is finished and whole; None if it must be made, or made again."""
        entry = self.entry(name, index)
        try:
            if entry is not None:
                self.verify(entry)
        except Damaged:
            return None
        return entry

    def fill(
        self,
        fingerprint: Fingerprint,
        blocks: Mapping[str, range],
        make: MakeBlock,
        rank: Rank = SINGLE,
        progress: Progress = lambda done, count: None,
        *,
        ignore: Collection[str] = (),
    ) -> bool:
        """Make this process's share of the blocks that are missing, as `begin` opens the folder.

        The first process waits for the others and completes the folder; it returns True, the others False.
        """
        count, own = sum(map(len, blocks.values())), list(blocks)[rank.index :: rank.world]
        if rank.index and not own:
            return False  # The folder may be gone by now.
        index = self.begin(fingerprint, ignore=ignore)

        def report() -> int:
            finished = self.finished_names() | (index.entries or {}).keys()
            done = sum(len(rows) for name, rows in blocks.items() if name in finished)
            progress(done, count)
            return done

        def make_missing(name: str, done: int) -> None:
            rows = blocks[name]
            if self.verified(name, index) is None:
                make(name, rows, lambda share: progress(min(done + share * len(rows), count), count))

        for name in own:
            # The first process may have finished meanwhile, and moved the entries to the index, or the whole folder.
            found = self.index()
            if found is None:
                return False
            index = found
            make_missing(name, report())
        if rank.index:
            return False
        index = self.index() or index
        rank.wait(f"the parts of the others in {self.path}", lambda: report() >= count)
        for name in blocks:
            make_missing(name, count)
        entries = {name: entry for name in blocks if (entry := self.entry(name, index)) is not None}
        # A smaller job does not forget the blocks of a larger one.
        self.finish(fingerprint, {**(index.entries or {}), **entries})
        return True

    def finish(self, fingerprint: Fingerprint, entries: Mapping[str, Entry]) -> None:
        """Write the index that makes the folder complete; what killed writers left behind before goes."""
        write_index(self.path / INDEX, Index(fingerprint, entries))
        # Newer temporary files are those of processes that are still repairing their blocks.
        for path in (*map(self._entry_file, entries), *self.left_behind):
            path.unlink(missing_ok=True)

    def tidy(self, names: Sequence[str]) -> None:
        """Remove the entries that a finished index has already."""
        index = self.index()
        if index is not None and index.entries is not None:
            for name in names:
                if self.entry(name, index) == index.entries.get(name):
                    self._entry_file(name).unlink(missing_ok=True)

    def finished_names(self) -> set[str]:
        """The blocks that have an entry beside them."""
        return {path.stem for path in self.path.glob("*.json") if path.name != INDEX}

    def _entry_file(self, name: str) -> Path:
        return self.path / f"{name}.json"


def block_ranges(count: int, size: int) -> dict[str, range]:
    """The rows of each block by its name. A short one's says how many it has: a larger count makes another of it.

    >>> block_ranges(6, 4)
    {'block-00000': range(0, 4), 'block-00001-2': range(4, 6)}
    """
    blocks = {}
    for number, start in enumerate(range(0, count, size)):
        rows = range(start, min(start + size, count))
        blocks[f"block-{number:05d}" + (f"-{len(rows)}" if len(rows) < size else "")] = rows
    return blocks


def check_fingerprint(path: Path, before: Fingerprint, now: Fingerprint, ignore: Collection[str] = ()) -> None:
    """Raise if a folder was made for something else."""
    changed = [key for key in {**now, **before} if key not in ignore and before.get(key) != now.get(key)]
    if changed:
        shown = ", ".join(f"{key} {before.get(key)} → {now.get(key)}" for key in changed[:3])
        raise BlockError(f"{path} was made with other settings ({shown}): give the same ones, or remove it")


def read_index(file: Path) -> Index | None:
    """An index; None if there is none, or it is damaged and all must be done again."""
    try:
        content = read_signed(file)
    except Damaged:
        return None
    if content.get("format") != FORMAT:
        raise BlockError(f"{file.parent} was made by another version of scalelong: remove it, and make it anew")
    entries = content["entries"]
    parsed = None if entries is None else {name: Entry(**entry) for name, entry in entries.items()}
    return Index(content["fingerprint"], parsed)


def write_index(file: Path, index: Index) -> Index:
    write_signed(file, {"format": FORMAT, **asdict(index)})
    return index
