"""Where a recipe's images are: in memory where they fit, else decoded once into the image cache on the disk."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

from ..utils.atomic import Busy, locked
from ..utils.blocks import POLL_SECONDS, BlockError, BlockFolder, Fingerprint, short_hash
from .config import DataConfig
from .dataset import ImageSet, Part, Progress, check_labels, decode_parts, open_parts
from .errors import DataError
from .prepare import Job, prepare
from .prepared import PreparedSet, images_fingerprint, read_folder

# How much of the free memory images may take: the rest is for the network, and for what else is running.
MEMORY_PART = 0.5

Images = tuple[ImageSet, ImageSet] | tuple[PreparedSet, PreparedSet]


def open_images(config: DataConfig, *, classes: int | None = None, progress: Progress | None = None) -> Images:
    """The images to train on and those for validation, from memory or from the image cache, which is filled if need be.

    What they are does not depend on where they are. Raises DataError as `load_images` does, and where neither the
    memory nor the disk can hold them. One process of the machine fills the cache; the others show how far it is.
    """
    fingerprint = images_fingerprint(config)
    job = Job(config, None, None, cache_folder(config, fingerprint), classes)
    if (cached := read_cache(job.folder, fingerprint, classes)) is not None:
        return cached
    parts = open_parts(config, classes)
    total = sum(len(part.rows) for part in parts)
    if fits_in_memory(total, config):
        return decode_parts(parts, progress)
    while cached is None:
        try:
            with locked(job.folder.with_name(f"{job.folder.name}.lock"), "another process decodes", wait=POLL_SECONDS):
                cached = read_cache(job.folder, fingerprint, classes) or fill_cache(job, parts, fingerprint, progress)
        except Busy:
            if progress is not None:
                progress(min(job.rows_together() * count_blocks(job.folder), total), total)
    return cached


def fill_cache(job: Job, parts: list[Part], fingerprint: Fingerprint, progress: Progress | None) -> Images:
    """Decode the images, and open what was made of them."""
    made = prepare(job, progress=progress, parts=parts)
    assert made is not None, "this is the only process"
    made.broken.report(sum(len(part.rows) for part in parts))
    cached = read_cache(job.folder, fingerprint, job.classes)
    assert cached is not None, "it was just made"
    return cached


def count_blocks(folder: Path) -> int:
    """How many blocks are finished; in the end the index has them all, and takes their entries away."""
    beside, index = BlockFolder(folder).finished_names(), BlockFolder(folder).index()
    return len(beside) if index is None or index.entries is None else len(index.entries)


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
    if classes is not None:
        for labels in (*data.train.blocks.columns("labels"), *data.validation.blocks.columns("labels")):
            check_labels(labels, [f"image {number}" for number in range(len(labels))], classes)
    return data.train, data.validation


def fits_in_memory(images: int, config: DataConfig) -> bool:
    """Whether so many decoded images may be held in memory."""
    size = images * prod(config.image_shape)
    if config.memory_gb is not None:
        return size <= config.memory_gb * 1e9
    import psutil

    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return size <= psutil.virtual_memory().available * MEMORY_PART / processes
