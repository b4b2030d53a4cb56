"""A folder of images that several processes fill together, that can be interrupted, and that is complete or absent.

Images are drawn in blocks of `batch` consecutive ones, dealt to the processes in turn: which images a network sees
together depends on their numbers alone. So on one machine the files are the same for any number of processes with as
many threads each, and any interruptions. They are written into `NAME.partial`, beside `NAME.partial.json` with the
settings, and renamed when all are there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..runs.run_dir import RunError
from ..utils.atomic import locked, replace_text
from ..utils.distributed import Rank
from .images import save_grid, save_picture, to_picture

GRID_IMAGES = 256
POLL_SECONDS = 0.2
IMAGE_NAME = re.compile(r"\d{6,}\.png")

Draw = Callable[[range, Callable[[float], None]], Tensor]
"""Draws the images of these numbers, and says what share of the work is done. Shape: (B, C, H, W), uint8."""
Progress = Callable[[float, int], None]
"""Called with how many images are done, and of how many."""


@dataclass(frozen=True)
class SampleFolder:
    """Where the images go, how many, and the settings that all of them must have been drawn with."""

    folder: Path
    settings: Mapping[str, Any]
    count: int
    batch: int
    shape: tuple[int, int, int]

    def fill(self, draw: Callable[[], Draw], rank: Rank, progress: Progress = lambda done, count: None) -> None:
        """Draw what is missing. `draw` is called only if something is, for it may have to load the network."""
        if self.is_complete():
            return
        if rank.index > 0:
            wait_until(lambda: self._is_prepared() or self.is_complete())
            self._draw_missing(draw, rank, progress)
            wait_until(lambda: not self._partial_settings.exists())
            return
        with self._locked():
            self._prepare()
            self._draw_missing(draw, rank, progress)
            self._finish(progress)

    @property
    def blocks(self) -> list[range]:
        return [range(start, min(start + self.batch, self.count)) for start in range(0, self.count, self.batch)]

    def is_complete(self) -> bool:
        """Whether the images are there; raises if others are in their place."""
        if not self.folder.exists():
            return False
        self._check(self._settings_file, self.folder)
        return all(self._is_whole(self.folder / name_of(number)) for number in range(self.count))

    # The places

    @property
    def partial(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.partial")

    @property
    def _settings_file(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def _partial_settings(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.partial.json")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other commands out of the folder; the system lets go of it when this process ends in any way."""
        with locked(self.partial / ".lock", busy=f"another process is drawing into {self.partial}"):
            yield

    # Settings

    @property
    def _full_settings(self) -> dict[str, Any]:
        return {**self.settings, "batch": self.batch, "count": self.count}

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def _check(self, file: Path, folder: Path) -> int:
        """How many images a folder is for; raises if they were drawn in another way."""
        found, wanted = self._read(file), self._full_settings
        changed = [key for key in wanted if key != "count" and found.get(key) != wanted[key]]
        if changed:
            shown = ", ".join(f"{key} {found.get(key)} → {wanted[key]}" for key in changed[:3])
            raise RunError(f"{folder} holds images with other settings ({shown}): give the same ones, or remove it")
        return int(found.get("count", 0))

    # The work

    def _is_prepared(self) -> bool:
        """Whether the first process has made the folder ready."""
        # Whoever removed the folder may have left its settings behind.
        return self.partial.is_dir() and self._read(self._partial_settings) == self._full_settings

    def _prepare(self) -> None:
        """Keep the images that belong here, of an interrupted command or a finished one for fewer images."""
        # Without images, whoever removed the folder has left its settings behind. If they are those of now, another
        # process may be drawing already.
        known = self._partial_settings.exists() and (images_in(self.partial) or self._is_prepared())
        self._keep_shared(self._check(self._partial_settings, self.partial) if known else 0)
        if self.folder.exists():
            self._take_over(self._check(self._settings_file, self.folder))
        text = json.dumps(self._full_settings, indent=1, ensure_ascii=False)
        replace_text(self._partial_settings, text + "\n")

    def _keep_shared(self, before: int) -> None:
        """Remove images of a block that now has another size, or of which nobody knows how they were drawn."""
        if before > self.count:
            raise RunError(
                f"{self.partial} holds {len(images_in(self.partial))} of {before} images of an interrupted command: "
                f"go on with -n {before}, or remove it"
            )
        for path in images_in(self.partial):
            if int(path.stem) >= self._shared_with(before):
                path.unlink()

    def _take_over(self, before: int) -> None:
        for path in images_in(self.folder):
            if int(path.stem) < self._shared_with(before) and self._is_whole(path):
                shutil.copyfile(path, self.partial / f".tmp-{path.name}")
                os.replace(self.partial / f".tmp-{path.name}", self.partial / path.name)

    def _shared_with(self, before: int) -> int:
        """How many images are in the same blocks whether `before` or `count` are drawn."""
        smaller = min(before, self.count)
        return smaller if before == self.count else smaller // self.batch * self.batch

    def _missing(self, numbers: range) -> list[int]:
        return [number for number in numbers if not self._is_whole(self.partial / name_of(number))]

    def _is_whole(self, path: Path) -> bool:
        """Whether a file is an image of the right size, and not a part of one."""
        from PIL import Image

        channels, height, width = self.shape
        try:
            with Image.open(path) as picture:
                picture.load()
                return picture.size == (width, height) and len(picture.getbands()) == channels
        except (OSError, SyntaxError, ValueError):
            return False

    def _draw_missing(self, draw: Callable[[], Draw], rank: Rank, progress: Progress) -> None:
        missing = [block for block in self.blocks[rank.index :: rank.world] if self._missing(block)]
        # Nothing was missing, and the first process has renamed the folder in the meantime.
        if not missing or not self.partial.exists():
            return
        drawing = draw()
        for block in missing:
            self._draw_block(block, drawing, progress)

    def _draw_block(self, block: range, draw: Draw, progress: Progress) -> None:
        done, missing = len(images_in(self.partial)), self._missing(block)
        images = draw(block, lambda share: progress(done + share * len(missing), self.count))
        # Those that are there were drawn in the same block; a file once there is never touched.
        for number in missing:
            save_picture(to_picture(images[number - block.start]), self.partial / name_of(number))

    def _finish(self, progress: Progress) -> None:
        """Wait for the other processes, add the grid, and give the folder its name."""

        def all_there() -> bool:
            done = len(images_in(self.partial))
            progress(done, self.count)
            return done >= self.count and not self._missing(range(self.count))

        wait_until(all_there)
        first = [read_image(self.partial / name_of(number)) for number in range(min(self.count, GRID_IMAGES))]
        save_grid(torch.stack(first), self.partial / "grid.png")
        for path in self.partial.glob(".*"):
            path.unlink()
        self._rename()

    def _rename(self) -> None:
        old = self.folder.with_name(f"{self.folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            os.rename(self.folder, old)
        replace_text(self._settings_file, self._partial_settings.read_text(encoding="utf-8"))
        os.rename(self.partial, self.folder)
        self._partial_settings.unlink()
        shutil.rmtree(old, ignore_errors=True)


def name_of(number: int) -> str:
    return f"{number:06d}.png"


def images_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if IMAGE_NAME.fullmatch(path.name)]


def read_image(file: Path | BinaryIO) -> Tensor:
    """Shape: (C, H, W), uint8."""
    from PIL import Image

    with Image.open(file) as picture:
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return pixels.view(picture.height, picture.width, -1).permute(2, 0, 1)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(POLL_SECONDS)
