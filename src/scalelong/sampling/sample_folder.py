"""A folder of images that several processes fill together, that can be interrupted, and that is complete or absent.

Images are sampled in blocks of `batch` consecutive ones: which images a network sees together depends on their numbers
alone. So on one machine the files are the same for any number of processes with as many threads each, and any
interruptions. Until all are there, they are in `NAME.partial`; `NAME.json` says how the images in `NAME` were made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..utils.atomic import Damaged, locked, verify_file, writing
from ..utils.blocks import (
    INDEX,
    BlockError,
    BlockFolder,
    Fingerprint,
    Index,
    Progress,
    block_ranges,
    check_fingerprint,
    read_index,
    wait_until,
    write_index,
)
from ..utils.distributed import Rank
from .images import read_image, save_grid, to_picture

GRID_IMAGES = 256

SampleBatch = Callable[[range, Callable[[float], None]], Tensor]
"""Samples the images of these numbers, and says what share of the work is done. Shape: (B, C, H, W), uint8."""


@dataclass(frozen=True)
class SampleFolder:
    """Where the images go, how many, and the settings that all of them must have been sampled with."""

    folder: Path
    settings: Mapping[str, Any]
    count: int
    batch: int

    def fill(
        self, open_sampler: Callable[[], SampleBatch], rank: Rank, progress: Progress = lambda done, count: None
    ) -> None:
        """Sample what is missing. `open_sampler` is called only if something is, for it has to load the network."""
        if self.is_complete():
            return
        sampler = cache(open_sampler)

        def make(name: str, numbers: range, done: Callable[[float], None]) -> None:
            paths = [self.partial / name_of(number) for number in numbers]
            for image, path in zip(sampler()(numbers, done), paths, strict=True):
                with writing(path):
                    to_picture(image).save(path)
            self.store.add_files(name, paths, rows=len(paths), broken={})

        if rank.index:
            wait_until(lambda: self.store.index() is not None or self.is_complete())
            if self.store.index() is not None:
                self.store.fill(self.fingerprint, self.blocks, make, rank, progress, ignore=["count"])
            wait_until(lambda: not self.partial.exists())
            return
        with locked(self.lock_file, busy=f"another process is sampling into {self.partial}"):
            self._begin()
            self.store.fill(self.fingerprint, self.blocks, make, rank, progress, ignore=["count"])
            self._complete()

    def is_complete(self) -> bool:
        """Whether the images are there; raises if others are in their place."""
        if not self.folder.exists():
            return False
        index = read_index(self.index_file) or Index({}, {})
        check_fingerprint(self.folder, index.fingerprint, self.fingerprint, ignore=["count"])
        files = {name: entry for block in (index.entries or {}).values() for name, entry in block.files.items()}
        try:
            for name in map(name_of, range(self.count)):
                verify_file(self.folder / name, *files[name])
        except (Damaged, KeyError):
            return False
        return True

    @property
    def fingerprint(self) -> Fingerprint:
        return {**self.settings, "batch": self.batch, "count": self.count}

    @cached_property
    def blocks(self) -> dict[str, range]:
        return block_ranges(self.count, self.batch)

    @property
    def store(self) -> BlockFolder:
        return BlockFolder(self.partial)

    @property
    def partial(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.partial")

    @property
    def index_file(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def lock_file(self) -> Path:
        # Beside the folder: Windows does not rename one with an open file in it.
        return self.folder.with_name(f".{self.folder.name}.lock")

    def _begin(self) -> None:
        """Open the partial folder, with the blocks of a finished one that had fewer images or has lost some."""
        index = self.store.begin(self.fingerprint, ignore=["count"])
        before = index.fingerprint["count"]
        if before > self.count:
            raise BlockError(
                f"{self.partial} holds {len(images_in(self.partial))} of {before} images of an interrupted command: "
                f"resume it with -n {before}, or remove it"
            )
        finished = read_index(self.index_file) if self.folder.exists() else None
        for name, entry in ((finished and finished.entries) or {}).items():
            if name in self.blocks and self.store.verified(name, index) is None:
                with suppress(Damaged):
                    BlockFolder(self.folder).verify(entry)
                    copies = [shutil.copyfile(self.folder / file, self.partial / file) for file in entry.files]
                    self.store.add_files(name, copies, rows=entry.rows, broken={})

    def _complete(self) -> None:
        """Add the grid, and give the folder its name."""
        first = [read_image(self.partial / name_of(number)) for number in range(min(self.count, GRID_IMAGES))]
        save_grid(torch.stack(first), self.partial / "grid.png")
        index = self.store.index()
        assert index is not None and index.entries is not None, "the folder is full"
        own = {INDEX, "grid.png", *map(name_of, range(self.count))}
        for path in self.partial.iterdir():
            if path.name not in own:
                path.unlink()
        old = self.folder.with_name(f"{self.folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            os.rename(self.folder, old)
        write_index(self.index_file, Index(self.fingerprint, {name: index.entries[name] for name in self.blocks}))
        os.rename(self.partial, self.folder)
        (self.folder / INDEX).unlink()
        shutil.rmtree(old, ignore_errors=True)


def name_of(number: int) -> str:
    return f"{number:06d}.png"


def images_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix == ".png" and path.stem.isdecimal()]
