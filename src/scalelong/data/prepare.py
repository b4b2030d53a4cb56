"""The job behind `scalelong prepare`: latents and text features, computed once and kept in shards.

What a shard holds is a function of the recipe and the data alone: it is encoded by itself, in batches of fixed sizes
and by one thread. So neither kills nor the number of processes can be seen in the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..utils.blocks import BlockFolder, Entry, Index
from ..utils.distributed import SINGLE, Rank
from .broken import BrokenImages
from .config import DataConfig
from .config_encoders import LatentConfig, TextConfig
from .encoders import repeatable
from .errors import DataError
from .facts import EMPTY, HASH_OF, PARTS, Part, asked, check_facts, choose_parts, found
from .images import Progress, decode_plan
from .shard_content import Rows, ShardEncoder

SHARD_ROWS = 256
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """What is to be prepared, and where."""

    data: DataConfig
    text: TextConfig | None
    latents: LatentConfig | None
    folder: Path
    classes: int | None = None
    shard_rows: int = SHARD_ROWS


@dataclass(frozen=True)
class Prepared:
    """What is in the folder in the end: rows by part, and the images that could not be read, with the reasons."""

    folder: Path
    rows: dict[str, int]
    bytes: int
    broken: tuple[str, ...]


class Task(NamedTuple):
    """One shard: some rows of a part, or the empty caption."""

    name: str
    part: int
    rows: Sequence[int]


def alone() -> bool:
    """No other process is known to be at work."""
    return False


def prepare(
    job: Job, rank: Rank = SINGLE, *, progress: Progress | None = None, others: Callable[[], bool] = alone
) -> Prepared | None:
    """Prepare what is not prepared yet; finished shards are verified and kept.

    Of several processes the first waits for the rest and returns what they made together; the others return None.
    `others` is called now and then; it says whether the rest is still at work, and raises if one failed.
    """
    work = Work(job, progress, others)
    work.run(rank)
    return work.finish() if rank.index == 0 else work.leave(rank)


class Work:
    """A job on its way: its rows, its folder, and the encoders once they are needed."""

    def __init__(self, job: Job, progress: Progress | None, others: Callable[[], bool]) -> None:
        check_job(job)
        self.job, self.others = job, others
        self.progress = progress or (lambda done, total: None)
        self.parts = choose_parts(job.data, job.text, latents=job.latents is not None, classes=job.classes)
        self.facts = asked(job.data, job.text, job.latents) | found(self.parts, job.text, job.latents)
        self.facts["shard_rows"] = job.shard_rows
        self.folder = BlockFolder(job.folder)
        before = self.folder.index()
        if before is not None:
            check_facts(job.folder, before.fingerprint, self.facts, "choose another --out, or remove it first")
        self.index: Index = self.folder.begin(self.facts, ignore=HASH_OF)
        self.tasks = list(make_tasks(job, self.parts))
        self.total = sum(len(task.rows) for task in self.tasks)
        self.broken = AllBroken(job.data.source)
        self.encoder: ShardEncoder | None = None
        self.entries: dict[str, Entry] = {}

    def run(self, rank: Rank) -> None:
        """Make the shards of one process, except those that are finished and whole."""
        with repeatable():
            for task in self.tasks[rank.index :: rank.world]:
                self.others()
                done = self._report_finished()
                if self.index.entries is None:
                    # The first process may have finished the job meanwhile, and put all entries there.
                    self.index = self.folder.index() or self.index
                entry = self.folder.verified(task.name, self.index)
                self.entries[task.name] = entry or self._make(task, rank.index, done)
                if entry is not None:
                    self._add_broken(entry)

    def finish(self) -> Prepared:
        """Wait for the shards of the other processes, and make the folder complete."""
        while self.others() or self._missing():
            self._report_finished()
            time.sleep(POLL_SECONDS)
        entries = {task.name: self._entry_of(task.name) for task in self.tasks}
        for name in entries.keys() - self.entries.keys():
            self._add_broken(entries[name])
        self.folder.finish(self.facts, entries)
        self.progress(self.total, self.total)
        return self._result(entries)

    def leave(self, rank: Rank) -> None:
        """The end of a process that is not the first."""
        self.folder.tidy([task.name for task in self.tasks[rank.index :: rank.world]])

    def _make(self, task: Task, rank: int, done: int) -> Entry:
        self.encoder = self.encoder or ShardEncoder(self.job.text, self.job.latents, rank)
        if task.name == EMPTY:
            return self.folder.add(EMPTY, {"text": self.encoder.features([""])}, rows=0, broken={})
        known = len(self.broken.all)
        rows = self._read(self.parts[task.part], task.rows)
        report = lambda share: self.progress(done + int(share * len(task.rows)), self.total)  # noqa: E731
        tensors = self.encoder.encode(rows, report)
        return self.folder.add(task.name, tensors, rows=len(rows), broken=dict(self.broken.all[known:]))

    def _read(self, part: Part, rows: Sequence[int]) -> Rows:
        """The rows of a shard; where images are needed, those that cannot be read are counted and left out."""
        plan = part.plan(rows)
        if self.job.latents is None:
            return Rows(None, None, plan.sides.captions)
        read = decode_plan(plan, part.config, self.broken)
        self.broken.check(self.total)
        return Rows(read.images, read.labels, read.captions)

    def _add_broken(self, entry: Entry) -> None:
        for name, reason in entry.broken.items():
            self.broken.add(name, reason)
        self.broken.check(self.total)

    def _report_finished(self) -> int:
        """Tell how many rows are in finished shards, those of other processes included."""
        finished = self.folder.finished_names() | self.entries.keys()
        done = sum(len(task.rows) for task in self.tasks if task.name in finished)
        self.progress(done, self.total)
        return done

    def _missing(self) -> list[str]:
        known = self.entries.keys() | self.folder.finished_names() | (self.index.entries or {}).keys()
        return [task.name for task in self.tasks if task.name not in known]

    def _entry_of(self, name: str) -> Entry:
        entry = self.entries.get(name) or self.folder.entry(name, self.index)
        assert entry is not None, "none was missing"
        return entry

    def _result(self, entries: dict[str, Entry]) -> Prepared:
        rows: dict[str, int] = {part: 0 for part in PARTS}
        for task in self.tasks:
            rows[PARTS[task.part]] += entries[task.name].rows
        size = sum(entry.bytes for entry in entries.values())
        return Prepared(self.job.folder, rows, size, tuple(f"{name}: {reason}" for name, reason in self.broken.all))


class AllBroken(BrokenImages):
    """Remembers every image, because the index names them all."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.all: list[tuple[str, str]] = []

    def add(self, name: str, reason: str) -> None:
        super().add(name, reason)
        self.all.append((name, reason))


def make_tasks(job: Job, parts: Sequence[Part]) -> Iterator[Task]:
    """The shards of a job in order; how many rows each holds does not depend on who makes it."""
    if job.text is not None:
        yield Task(EMPTY, 0, ())
    for number, part in enumerate(parts):
        for count, start in enumerate(range(0, len(part.rows), job.shard_rows)):
            yield Task(f"{PARTS[number]}-{count:05d}", number, part.rows[start : start + job.shard_rows])


def check_job(job: Job) -> None:
    """Raise where a recipe cannot be prepared, before anything is opened."""
    if job.latents is None:
        if job.text is None:
            raise DataError("there is nothing to prepare: the recipe has neither a text: nor a latents: block")
        return
    if job.data.flip:
        raise DataError(
            "data.flip: latents are computed once, and those of a mirrored image are not the mirrored ones; set it to "
            "false"
        )
    if job.data.channels != 3:
        raise DataError(f"data.channels: an autoencoder takes colour, so 3, not {job.data.channels}")
    if job.data.image_size % job.latents.factor:
        raise DataError(f"data.image_size: must be a multiple of latents.factor ({job.latents.factor})")
