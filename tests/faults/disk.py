"""A disk that may lose whatever was not synced when the power goes: recorded from a real folder, and replayed.

Three kinds of things happen to it. Names: an entry of a folder appears, goes, or moves, which is durable once the
folder is synced. Content: a file has other bytes, durable once the file is synced. And reports: the program says that
something is saved. Of what is not durable the power loss takes anything: all, the later part, or any choice of it; and
of a file's last change it may leave a part, with zeros after it.

Writes are not recorded, but seen by comparing the folder before and after each operation, so that it does not matter
who writes, and how.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .operations import watched

ROOT = 0
WAYS = ("nothing", "names", "content", "everything", "first", "any", "any")
"""What survives of all that was not synced: no change, those of names or of content only, all, the first ones, any."""

Place = tuple[int, str]
"""An entry of a folder: the folder's number, and the name."""
Tree = dict[str, bytes | None]
"""Files by their path; None for a folder."""


@dataclass(frozen=True)
class Names:
    """Entries that change together: the number of the file or folder that each is now, or None."""

    changes: Mapping[Place, int | None]


@dataclass(frozen=True)
class Content:
    """A file has these bytes now."""

    file: int
    data: bytes


@dataclass(frozen=True)
class Synced:
    """What was said of a file, or the entries of a folder, is on the disk."""

    number: int


@dataclass(frozen=True)
class Reported:
    """From here on the user counts on something."""

    what: Any


Event = Names | Content | Synced | Reported


class Recorder:
    """Everything that happens to the files below a folder, in its order; what is there at first is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.folders = {ROOT}
        self.entries: dict[Place, int] = {}
        self.contents: dict[int, bytes] = {}
        self.numbers: dict[int, int] = {}
        self.count = ROOT
        self.notice()
        self.events += map(Synced, (*self.folders, *self.contents))
        self.first = len(self.events)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While entered, every operation of this process is seen."""
        with watched(lambda name, args: self.notice(), self.after):
            yield
        self.notice()

    def after(self, name: str, args: tuple[Any, ...]) -> None:
        self.notice()
        if name == "fsync" and (number := self.numbers.get(os.fstat(args[0]).st_ino)) is not None:
            self.events.append(Synced(number))

    def report(self, what: Any) -> None:
        self.notice()
        self.events.append(Reported(what))

    def notice(self) -> None:
        """Write down what has changed since the last time."""
        entries, contents, numbers = {}, {}, {os.stat(self.folder).st_ino: ROOT}
        for parent, entry in self.walk(self.folder, numbers):
            number = entries[parent, entry.name] = numbers[entry.inode()]
            if number not in self.folders:
                contents[number] = Path(entry.path).read_bytes()
        moved: dict[int, dict[Place, int | None]] = {}
        # A move takes one entry away and makes another; of all else each stands for itself.
        for place in {**self.entries, **entries}:
            if entries.get(place) != self.entries.get(place):
                moved.setdefault(entries.get(place, self.entries.get(place, ROOT)), {})[place] = entries.get(place)
        self.events += [Content(file, data) for file, data in contents.items() if self.contents.get(file) != data]
        self.events += map(Names, moved.values())
        # The number of a file that is gone may be another's the next time.
        self.entries, self.contents, self.numbers = entries, contents, numbers

    def walk(self, folder: Path | str, numbers: dict[int, int]) -> Iterator[tuple[int, os.DirEntry[str]]]:
        """Every entry with the number of its folder; the number of each goes to `numbers` by its inode."""
        parent = numbers[os.stat(folder).st_ino]
        with os.scandir(folder) as found:
            entries = list(found)
        for entry in entries:
            numbers[entry.inode()] = self.numbers.get(entry.inode()) or self.new_number()
            if entry.is_dir():
                self.folders.add(numbers[entry.inode()])
            yield parent, entry
            if entry.is_dir():
                yield from self.walk(entry.path, numbers)

    def new_number(self) -> int:
        self.count += 1
        return self.count


@dataclass
class Disk:
    """What is on the disk for sure, and what is not yet, after some events."""

    folders: set[int]
    entries: dict[Place, int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    names: list[Names] = field(default_factory=list)
    writes: dict[int, list[bytes]] = field(default_factory=dict)
    reported: list[Any] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        match event:
            case Names():
                self.names.append(event)
            case Content(file, data):
                self.writes.setdefault(file, []).append(data)
            case Reported(what):
                self.reported.append(what)
            case Synced(number):
                self.sync(number)

    def sync(self, number: int) -> None:
        if number in self.writes:
            self.contents[number] = self.writes.pop(number)[-1]
        # A move between two folders is on the disk as soon as it is in one of them: no file system does half of it.
        durable = [names for names in self.names if any(folder == number for folder, _ in names.changes)]
        self.names = [names for names in self.names if names not in durable]
        change(self.entries, durable)

    def after_power_loss(self, way: str, chance: random.Random) -> Tree:
        """The files that are there when the machine is on again."""
        entries = dict(self.entries)
        change(entries, self.surviving_names(way, chance))
        kept = {number: self.surviving_content(number, way, chance) for number in sorted(set(entries.values()))}
        children: dict[int, list[tuple[str, int]]] = {}
        for (parent, name), number in sorted(entries.items()):
            children.setdefault(parent, []).append((name, number))
        tree: Tree = {}

        def collect(parent: int, prefix: str) -> None:
            for name, number in children.get(parent, ()):
                is_folder = number in self.folders
                tree[prefix + name] = None if is_folder else kept[number]
                if is_folder and prefix.count("/") < 20:  # Of reordered moves one may lead in a circle.
                    collect(number, f"{prefix}{name}/")

        collect(ROOT, "")
        return tree

    def surviving_names(self, way: str, chance: random.Random) -> Sequence[Names]:
        if way in ("nothing", "content"):
            return []
        if way in ("everything", "names"):
            return self.names
        if way == "first":
            return self.names[: chance.randint(0, len(self.names))]
        return [names for names in self.names if chance.random() < 0.5]

    def surviving_content(self, number: int, way: str, chance: random.Random) -> bytes:
        old, later = self.contents.get(number, b""), self.writes.get(number, [])
        if not later or way in ("nothing", "names"):
            return old
        if way in ("everything", "content"):
            return later[-1]
        versions = [old, *later]
        place = chance.randrange(len(later))
        return torn(versions[place], versions[place + 1], chance)


def torn(old: bytes, new: bytes, chance: random.Random) -> bytes:
    """A change of a file that is there in part: none or all of it, its beginning, or zeros instead of the rest."""
    kind, place = chance.randrange(4), chance.randint(0, len(new))
    if kind < 2:
        return new if kind else old
    same = len(os.path.commonprefix([old, new])) if old and new.startswith(old) else 0
    place = max(place, same)  # What was appended to was not touched.
    return new[:place] if kind == 2 else new[:place] + bytes(len(new) - place)


def change(entries: dict[Place, int], several: Sequence[Names]) -> None:
    for names in several:
        for place, number in names.changes.items():
            if number is None:
                entries.pop(place, None)
            else:
                entries[place] = number


def crashes(recorder: Recorder, points: Sequence[int]) -> Iterator[tuple[int, Disk]]:
    """The disk at some numbers of events, in ascending order."""
    disk, wanted = Disk(recorder.folders), set(points)
    for number, event in enumerate(recorder.events):
        disk.apply(event)
        if number in wanted:
            yield number, disk


def write_tree(tree: Tree, folder: Path) -> Path:
    """Make the files of a tree in a new folder."""
    folder.mkdir(parents=True)
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)
    return folder
