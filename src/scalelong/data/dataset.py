"""Where a recipe's images are: in memory where they fit, else decoded once into the image cache on the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..utils.atomic import Busy, locked
from ..utils.block_folder import BlockError, BlockFolder, Fingerprint
from ..utils.runtime import POLL_SECONDS
from .batches import ImageSet
from .config import DataConfig, DataError
from .decode import BrokenImages, Part, Progress, open_parts
from .prepare import Job, prepare
from .prepared import PreparedSet, read_folder
from .sources import check_labels, images_fingerprint, short_hash

# How much of the free memory images may take: the rest is for the network, and for what else is running.
MEMORY_PART = 0.5


class ImageData(NamedTuple):
    """The images to train on and those for validation; no image is in both."""

    train: ImageSet
    validation: ImageSet


Images = ImageData | tuple[PreparedSet, PreparedSet]


def open_images(config: DataConfig, *, classes: int | None = None, progress: Progress | None = None) -> Images:
    """The images to train on and those for validation, from memory or from the image cache, which is filled if need be.

    What they are does not depend on where they are. Raises DataError as `load_images` does, and where neither the
    memory nor the disk can hold them.
    """
    fingerprint = images_fingerprint(config)
    folder = cache_folder(config, fingerprint)
    if (cached := read_cache(folder, fingerprint, classes)) is not None:
        return cached
    parts = open_parts(config, classes)
    if fits_in_memory(sum(map(len, parts)), config):
        return decode_parts(parts, progress)
    return fill_cache(Job(config, None, None, folder, classes), parts, fingerprint, progress)


def load_images(config: DataConfig, *, classes: int | None = None, progress: Progress | None = None) -> ImageData:
    """Decode every image that the configuration asks for; raises DataError where it asks for what is not there.

    With `classes`, labels must lie in 0 … classes - 1. Images that cannot be read are left out with their labels and
    captions, and named in a warning; more than 1 % of them are an error.

    >>> data = load_images(DataConfig(source="sklearn:digits", image_size=8, channels=1, validation_count=97))
    >>> data.train.images.shape, data.validation.images.shape
    (torch.Size([1700, 1, 8, 8]), torch.Size([97, 1, 8, 8]))
    """
    return decode_parts(open_parts(config, classes), progress)


def decode_parts(parts: Sequence[Part], progress: Progress | None = None) -> ImageData:
    """All images of both parts, in memory."""
    broken, total, done = BrokenImages(parts[0].config.source), sum(map(len, parts)), 0

    def count() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    sets = [part.decode(broken, count) for part in parts]
    broken.check(total)
    broken.report(total)
    return ImageData(*sets)


def fits_in_memory(images: int, config: DataConfig) -> bool:
    """Whether so many decoded images may be held in memory."""
    size = images * config.channels * config.image_size**2
    if config.memory_gb is not None:
        return size <= config.memory_gb * 1e9
    import psutil

    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return size <= psutil.virtual_memory().available * MEMORY_PART / processes


def cache_root() -> Path:
    """`SCALELONG_CACHE`, else the user's folder for what can be made again."""
    if named := os.environ.get("SCALELONG_CACHE"):
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


def fill_cache(job: Job, parts: list[Part], fingerprint: Fingerprint, progress: Progress | None) -> Images:
    """Decode the images into the cache, and open it; one process of the machine does, others show how far it is."""
    lock, total = job.folder.with_name(f"{job.folder.name}.lock"), sum(map(len, parts))
    while True:
        try:
            with locked(lock, "another process decodes", wait=POLL_SECONDS):
                if (cached := read_cache(job.folder, fingerprint, job.classes)) is None:
                    made = prepare(job, progress=progress, parts=parts)
                    assert made is not None, "this is the only process"
                    made.broken.report(total)
                    cached = read_cache(job.folder, fingerprint, job.classes)
                    assert cached is not None, "it was just made"
                return cached
        except Busy:
            if progress is not None:
                progress(min(job.rows_together() * count_blocks(job.folder), total), total)


def count_blocks(folder: Path) -> int:
    """How many blocks are finished; in the end the index has them all, and takes their entries away."""
    beside, index = BlockFolder(folder).finished_names(), BlockFolder(folder).index()
    return len(beside) if index is None or index.entries is None else len(index.entries)
