"""Where a recipe's images are: in memory where they fit, else decoded once into the image cache on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

from filelock import FileLock, Timeout

from ..utils.blocks import BlockError, BlockFolder, short_hash
from .columns import check_labels
from .config import DataConfig
from .dataset import ImageSet, Part, Progress, decode_parts, open_parts
from .errors import DataError
from .fingerprint import Fingerprint, images_fingerprint
from .prepare import POLL_SECONDS, Job, prepare
from .prepared import PreparedSet, read_folder

# How much of the free memory images may take: the rest is for the network, and for what else is running.
MEMORY_PART = 0.5

Images = tuple[ImageSet, ImageSet] | tuple[PreparedSet, PreparedSet]


def open_images(config: DataConfig, *, classes: int | None = None, progress: Progress | None = None) -> Images:
    """The images to train on and those for validation, from memory or from the image cache, which is filled if need be.

    What they are does not depend on where they are. Raises DataError as `load_images` does, and where neither the
    memory nor the disk can hold them.
    """
    fingerprint = images_fingerprint(config)
    folder = cache_folder(config, fingerprint)
    cached = read_cache(folder, fingerprint, classes)
    if cached is not None:
        return cached
    parts = open_parts(config, classes)
    if fits_in_memory(parts, config):
        images = decode_parts(parts, progress)
        return images.train, images.validation
    with turn(folder, parts, progress):
        cached = read_cache(folder, fingerprint, classes)
        if cached is None:
            made = prepare(Job(config, None, None, folder, classes), progress=progress, parts=parts)
            assert made is not None, "this is the only process"
            made.broken.report(sum(len(part.rows) for part in parts))
    cached = cached or read_cache(folder, fingerprint, classes)
    assert cached is not None, "it was just made"
    return cached


def cache_root() -> Path:
    """`SCALELONG_CACHE`, else the user's folder for what can be made again."""
    named = os.environ.get("SCALELONG_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalelong"


def cache_folder(config: DataConfig, fingerprint: Fingerprint | None = None) -> Path:
    """The folder of a recipe's images; its name follows everything they depend on."""
    name = Path(config.source).stem.replace(":", "-").replace("*", "")
    return cache_root() / "images" / f"{name}-{short_hash(fingerprint or images_fingerprint(config))}"


def read_cache(folder: Path, fingerprint: Fingerprint, classes: int | None) -> Images | None:
    """What is in the cache; None if it is not complete, or damaged. The source is not opened."""
    if not folder.is_dir():
        return None
    try:
        data = read_folder(BlockFolder(folder), fingerprint)
    except (DataError, BlockError):
        return None
    for part in (data.train, data.validation):
        for labels in part.blocks.columns("labels"):
            if classes is not None and labels.max() >= classes:
                check_labels(labels, [f"image {number}" for number in range(len(labels))], classes)
    return data.train, data.validation


def fits_in_memory(parts: Sequence[Part], config: DataConfig) -> bool:
    """Whether the decoded images may be held in memory."""
    size = sum(len(part.rows) for part in parts) * prod(config.image_shape)
    if config.memory_gb is not None:
        return size <= config.memory_gb * 1e9
    import psutil

    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return size <= psutil.virtual_memory().available * MEMORY_PART / processes


@contextmanager
def turn(folder: Path, parts: Sequence[Part], progress: Progress | None) -> Iterator[None]:
    """Wait until no other process of the machine fills the folder, and show how far it is meanwhile."""
    total = sum(len(part.rows) for part in parts)
    rows = Job(parts[0].config, None, None, folder).rows_together()
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    while not lock.is_locked:
        try:
            lock.acquire(timeout=POLL_SECONDS)
        except Timeout:
            if progress is not None:
                progress(min(rows * len(BlockFolder(folder).finished_names()), total), total)
    try:
        yield
    finally:
        lock.release()
