"""Images as PNG files: a grid, or a folder that several processes fill together and that is complete or absent.

Images are sampled in blocks of `batch` consecutive ones: which images a network sees together depends on their numbers
alone. So on one machine the files are the same for any number of processes with as many threads each, and any
interruptions. Until all are there, they are in `NAME.partial`; `NAME.json` says how the images in `NAME` were made.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from ..utils import block_folder as blocks
from ..utils.atomic import Damaged, atomic_write, locked, publish, verify_files, writing
from ..utils.runtime import Rank

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SHORTEST_SIDE = 400
GRID_IMAGES = 256

SampleBatch = Callable[[range, Callable[[float], None]], Tensor]
"""Samples the images of these numbers, and says what share of the work is done. Shape: (B, C, H, W), uint8."""


def tile(images: Tensor, *, gap: int = 1) -> Tensor:
    """Images side by side in a near-square grid with a white gap. Shape: (N, C, H, W) → (C, grid height, grid width).

    >>> tile(torch.zeros(5, 1, 8, 8, dtype=torch.uint8)).shape
    torch.Size([1, 19, 28])
    """
    count, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    sheet = images.new_full((channels, rows * (height + gap) + gap, columns * (width + gap) + gap), 255)
    for index, image in enumerate(images):
        top, left = gap + index // columns * (height + gap), gap + index % columns * (width + gap)
        sheet[:, top : top + height, left : left + width] = image
    return sheet


def to_picture(image: Tensor) -> Picture:
    """Shape: (C, H, W), uint8, with one channel or three."""
    from PIL import Image

    return Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())


def read_image(file: Path | BinaryIO) -> Tensor:
    """Shape: (C, H, W), uint8."""
    from PIL import Image

    with Image.open(file) as picture:
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return pixels.view(picture.height, picture.width, -1).permute(2, 0, 1)


def save_grid(images: Tensor, path: Path) -> None:
    """A grid as PNG, small images enlarged by a whole factor without smoothing. Shape: (N, C, H, W), uint8."""
    from PIL import Image

    picture = to_picture(tile(images))
    factor = math.ceil(SHORTEST_SIDE / min(picture.size))
    large = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    atomic_write(path, lambda temporary: large.save(temporary, format="PNG"))


class SampleFolder:
    """Where the images go, how many, and the settings that all of them must have been sampled with."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], count: int, batch: int) -> None:
        self.folder, self.count = folder, count
        self.fingerprint: blocks.Fingerprint = {**settings, "batch": batch, "count": count}
        self.blocks = blocks.block_ranges(count, batch)
        self.partial, self.old = (folder.with_name(f"{folder.name}.{what}") for what in ("partial", "old"))
        self.index_file = folder.with_name(f"{folder.name}.json")
        # Beside the folder: Windows does not rename one with an open file in it.
        self.lock_file = folder.with_name(f".{folder.name}.lock")

    def fill(
        self,
        open_sampler: Callable[[], SampleBatch],
        rank: Rank,
        progress: blocks.Progress = lambda done, count: None,
    ) -> None:
        """Sample what is missing. `open_sampler` is called only if something is, for it has to load the network."""
        if self.is_complete():
            if not rank.index:
                self._tidy()
            return
        sampler, store = cache(open_sampler), blocks.BlockFolder(self.partial)

        def make(name: str, numbers: range, done: Callable[[float], None]) -> None:
            paths = [self.partial / name_of(number) for number in numbers]
            for image, path in zip(sampler()(numbers, done), paths, strict=True):
                with writing(path):
                    to_picture(image).save(path)
            store.add_files(name, paths, rows=len(paths))

        if rank.index:
            begun = f"the first process to open {self.partial}"
            rank.wait(begun, lambda: store.index() is not None or self.is_complete())
            if store.index() is not None:
                store.fill(self.fingerprint, self.blocks, make, rank, progress, ignore=["count"])
            rank.wait(f"the images {self.folder}", lambda: not self.partial.exists())
            return
        with locked(self.lock_file, busy=f"another process is sampling into {self.partial}"):
            if not self.partial.exists():
                sampler()  # First, so that a network or an encoder that cannot be loaded leaves nothing behind.
            self._begin(store)
            store.fill(self.fingerprint, self.blocks, make, rank, progress, ignore=["count"])
            self._complete(store)

    def is_complete(self) -> bool:
        """Whether the images are there; raises if others are in their place."""
        if not self.folder.exists():
            return False
        index = blocks.read_index(self.index_file) or blocks.Index({}, {})
        blocks.check_fingerprint(self.folder, index.fingerprint, self.fingerprint, ignore=["count"])
        files = {name: entry for block in (index.entries or {}).values() for name, entry in block.files.items()}
        try:
            verify_files(self.folder, {name: files[name] for name in map(name_of, range(self.count))})
        except (Damaged, KeyError):
            return False
        return True

    def _begin(self, store: blocks.BlockFolder) -> None:
        """Open the partial folder, with the blocks of a finished one that had fewer images or has lost some."""
        index = store.begin(self.fingerprint, ignore=["count"])
        before = index.fingerprint["count"]
        if before > self.count:
            raise blocks.BlockError(
                f"{self.partial} holds {len(images_in(self.partial))} of {before} images of an interrupted command: "
                f"resume it with -n {before}, or remove it"
            )
        finished = blocks.read_index(self.index_file) if self.folder.exists() else None
        for name, entry in ((finished and finished.entries) or {}).items():
            if name in self.blocks and store.verified(name, index) is None:
                with suppress(Damaged):
                    verify_files(self.folder, entry.files)
                    copies = [shutil.copyfile(self.folder / file, self.partial / file) for file in entry.files]
                    store.add_files(name, copies, rows=entry.rows)

    def _complete(self, store: blocks.BlockFolder) -> None:
        """Add the grid, and give the folder its name."""
        first = [read_image(self.partial / name_of(number)) for number in range(min(self.count, GRID_IMAGES))]
        save_grid(torch.stack(first), self.partial / "grid.png")
        index = store.index()
        assert index is not None and index.entries is not None, "the folder is full"
        own = {blocks.INDEX, "grid.png", *map(name_of, range(self.count))}
        for path in self.partial.iterdir():
            if path.name not in own:
                path.unlink()
        shutil.rmtree(self.old, ignore_errors=True)
        if self.folder.exists():
            os.rename(self.folder, self.old)
        entries = {name: index.entries[name] for name in self.blocks}
        blocks.write_index(self.index_file, blocks.Index(self.fingerprint, entries))
        publish(self.partial, self.folder)
        self._tidy()

    def _tidy(self) -> None:
        """Remove what only an unfinished folder needs, also where a kill came before it."""
        (self.folder / blocks.INDEX).unlink(missing_ok=True)
        shutil.rmtree(self.old, ignore_errors=True)


def name_of(number: int) -> str:
    return f"{number:06d}.png"


def images_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix == ".png" and path.stem.isdecimal()]
