"""The job behind `scalelong prepare`: what is computed once, and kept in blocks of rows on the disk.

For a recipe with text or latents these are the features and latents, else the decoded images themselves. What a block
holds is a function of the recipe and the data alone: it is made by itself, in batches of fixed sizes and by one thread.
So neither kills nor the number of processes can be seen in the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import NamedTuple

from ..utils.atomic import free_space, human_size
from ..utils.blocks import BlockFolder, Entry, Index
from ..utils.process import SINGLE, Rank
from .block_content import BlockEncoder, Rows
from .config import DataConfig, LatentConfig, TextConfig
from .dataset import Part, Progress, decode_plan, open_parts
from .encoders import repeatable
from .errors import BrokenImages, DataError
from .fingerprint import (
    EMPTY,
    HASH_OF,
    PARTS,
    Fingerprint,
    asked,
    check_fingerprint,
    contents_of,
    encoder_hashes,
    images_fingerprint,
    parts_to_encode,
)

ENCODED_ROWS = 256
# Decoded images take little time each, and a file for a few of them would be small.
IMAGES_BYTES = 64 << 20
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """What is to be prepared, and where; without text and latents it is the images."""

    data: DataConfig
    text: TextConfig | None
    latents: LatentConfig | None
    folder: Path
    classes: int | None = None
    block_rows: int | None = None

    @property
    def images_only(self) -> bool:
        return self.text is None and self.latents is None

    def open(self) -> list[Part]:
        """The rows of the source, which are checked."""
        if self.images_only:
            return open_parts(self.data, self.classes)
        return parts_to_encode(self.data, self.text, latents=self.latents is not None, classes=self.classes)

    def rows_together(self) -> int:
        """How many rows a block has."""
        if self.block_rows is not None:
            return self.block_rows
        return max(1, IMAGES_BYTES // prod(self.data.image_shape)) if self.images_only else ENCODED_ROWS

    def fingerprint(self, parts: Sequence[Part]) -> Fingerprint:
        """What the files depend on."""
        if self.images_only:
            fingerprint = images_fingerprint(self.data)
        else:
            fingerprint = asked(self.data, self.text, self.latents)
            fingerprint |= contents_of(parts, pictures=self.latents is not None)
            fingerprint |= encoder_hashes(self.text, self.latents, download=True)
        return fingerprint | {"shard_rows": self.rows_together()}


@dataclass(frozen=True)
class Prepared:
    """What is in the folder in the end: rows by part, and the images that could not be read."""

    folder: Path
    rows: dict[str, int]
    bytes: int
    broken: BrokenImages


class Task(NamedTuple):
    """One block: some rows of a part, or the empty caption."""

    name: str
    part: int
    rows: Sequence[int]


def prepare(
    job: Job, rank: Rank = SINGLE, *, progress: Progress | None = None, parts: list[Part] | None = None
) -> Prepared | None:
    """Prepare what is not prepared yet; finished blocks are verified and kept. `parts` saves opening the source.

    Of several processes the first waits for the rest and returns what they made together; the others return None.
    """
    work = Work(job, progress, parts)
    work.run(rank)
    return work.finish() if rank.index == 0 else work.leave(rank)


class Work:
    """A job on its way: its rows, its folder, and the encoders once they are needed."""

    def __init__(self, job: Job, progress: Progress | None = None, parts: list[Part] | None = None) -> None:
        check_job(job)
        self.job, self.progress = job, progress or (lambda done, total: None)
        self.parts = parts or job.open()
        self.tasks = list(make_tasks(job, self.parts))
        self.total = sum(len(task.rows) for task in self.tasks)
        self.fingerprint = job.fingerprint(self.parts)
        self.folder = BlockFolder(job.folder)
        if job.images_only:
            check_space(job, self.total)
            for task in self.tasks:
                # Labels and captions are refused before anything is decoded.
                self.parts[task.part].plan(task.rows)
        before = self.folder.index()
        if before is not None:
            check_fingerprint(
                job.folder, before.fingerprint, self.fingerprint, "choose another --out, or remove it first"
            )
        self.index: Index = self.folder.begin(self.fingerprint, ignore=HASH_OF)
        self.broken = BrokenImages(job.data.source)
        self.encoder: BlockEncoder | None = None
        self.entries: dict[str, Entry] = {}

    def run(self, rank: Rank) -> None:
        """Make the blocks of one process, except those that are finished and whole."""
        with repeatable():
            for task in self.tasks[rank.index :: rank.world]:
                done = self._report_finished()
                if self.index.entries is None:
                    # The first process may have finished the job meanwhile, and put all entries there.
                    self.index = self.folder.index() or self.index
                entry = self.folder.verified(task.name, self.index)
                if entry is not None:
                    self._count_broken(entry)
                self.entries[task.name] = entry or self._make(task, rank.index, done)

    def finish(self) -> Prepared:
        """Wait for the blocks of the other processes, and make the folder complete."""
        while self._missing():
            self._report_finished()
            time.sleep(POLL_SECONDS)
        for task in self.tasks:
            if task.name not in self.entries:
                entry = self.folder.entry(task.name, self.index)
                assert entry is not None, "none was missing"
                self.entries[task.name] = entry
                self._count_broken(entry)
        self.folder.finish(self.fingerprint, {task.name: self.entries[task.name] for task in self.tasks})
        self.progress(self.total, self.total)
        rows: dict[str, int] = {part: 0 for part in PARTS}
        for task in self.tasks:
            rows[PARTS[task.part]] += self.entries[task.name].rows
        size = sum(entry.bytes for entry in self.entries.values())
        return Prepared(self.job.folder, rows, size, self.broken)

    def leave(self, rank: Rank) -> None:
        """The end of a process that is not the first."""
        self.folder.tidy([task.name for task in self.tasks[rank.index :: rank.world]])

    def _make(self, task: Task, rank: int, done: int) -> Entry:
        self.encoder = self.encoder or BlockEncoder(self.job.text, self.job.latents, rank)
        if task.name == EMPTY:
            return self.folder.add(EMPTY, {"text": self.encoder.features([""])}, rows=0, broken={})
        known = len(self.broken.found)
        report = lambda share: self.progress(done + int(share * len(task.rows)), self.total)  # noqa: E731
        rows = self._read(self.parts[task.part], task.rows, report)
        tensors = self.encoder.encode(rows, report)
        return self.folder.add(task.name, tensors, rows=len(rows), broken=dict(self.broken.found[known:]))

    def _read(self, part: Part, rows: Sequence[int], report: Callable[[float], None]) -> Rows:
        """The rows of a block; where images are needed, those that cannot be read are counted and left out."""
        plan = part.plan(rows)
        if self.job.latents is None and self.job.text is not None:
            return Rows(None, None, plan.annotations.captions)
        done = count(1)
        # Decoding takes long where nothing is encoded; otherwise it is the encoding that is reported.
        decoded = (lambda: report(next(done) / len(rows))) if self.job.images_only else (lambda: None)
        read = decode_plan(plan, part.config, self.broken, decoded)
        self.broken.check(self.total)
        return Rows(read.images, read.labels, read.captions)

    def _count_broken(self, entry: Entry) -> None:
        for name, reason in entry.broken.items():
            self.broken.add(name, reason)
        self.broken.check(self.total)

    def _report_finished(self) -> int:
        """Tell how many rows are in finished blocks, those of other processes included."""
        finished = self.folder.finished_names() | self.entries.keys()
        done = sum(len(task.rows) for task in self.tasks if task.name in finished)
        self.progress(done, self.total)
        return done

    def _missing(self) -> list[str]:
        known = self.entries.keys() | self.folder.finished_names() | (self.index.entries or {}).keys()
        return [task.name for task in self.tasks if task.name not in known]


def make_tasks(job: Job, parts: Sequence[Part]) -> Iterator[Task]:
    """The blocks of a job in order; how many rows each holds does not depend on who makes it."""
    if job.text is not None:
        yield Task(EMPTY, 0, ())
    size = job.rows_together()
    for number, part in enumerate(parts):
        for place, start in enumerate(range(0, len(part.rows), size)):
            yield Task(f"{PARTS[number]}-{place:05d}", number, part.rows[start : start + size])


def check_job(job: Job) -> None:
    """Raise where a recipe cannot be prepared, before anything is opened."""
    if job.latents is None:
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


def check_space(job: Job, rows: int) -> None:
    """Raise, before the first image is decoded, where the disk has no room for them all."""
    size = rows * prod(job.data.image_shape)
    there = sum(file.stat().st_size for file in job.folder.glob("*.safetensors"))
    free = free_space(job.folder)
    if free is not None and size - there > free:
        raise DataError(
            f"data.source: {rows} images take {human_size(size)} in the image cache, {job.folder}, but only "
            f"{human_size(free)} are free there. Free some space, let SCALELONG_CACHE name a folder on a larger disk, "
            "set a smaller data.image_size, or a larger data.memory_gb if there is enough memory"
        )
