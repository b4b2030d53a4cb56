"""Opening a source: as a set in memory or as a stream, with some images held out in memory either way."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch

from .broken import BrokenImages
from .columns import narrow, read_sides, side_columns
from .config import DataConfig
from .errors import DataError
from .examples import BatchSource
from .images import ImageSet, Plan, Progress, decode_plan, load_images, spread, too_few
from .loader import BatchDraws, Batches, BatchOrder
from .shards import Shards, TableShards
from .sources import open_shards, pick_split
from .streaming import StreamBatches
from .streams import ImageStream
from .tables import Raw


def open_batches(
    config: DataConfig,
    draws: BatchDraws,
    *,
    classes: int | None = None,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> tuple[BatchSource, ImageSet]:
    """One process's batches of a recipe's images, streamed or from memory, and the images held out."""
    if config.streaming:
        streamed = load_stream(config, classes=classes)
        batches = StreamBatches(streamed.train, draws, flip=config.flip, rank=rank, world=world, device=device)
        return batches, streamed.validation
    data = load_images(config, classes=classes, progress=progress)
    order = BatchOrder(len(data.train), draws.batch_size, draws.seed)
    batches = Batches(data.train, order, flip=config.flip, rank=rank, world=world, device=device)
    return batches, data.validation


@dataclass(frozen=True)
class StreamData:
    """A stream of images to train on, and those held out, in memory; no image is in both."""

    train: ImageStream
    validation: ImageSet


def load_stream(config: DataConfig, *, classes: int | None = None) -> StreamData:
    """Open a source to be streamed, and decode what is held out; raises DataError as `load_images` does.

    Labels and captions are checked at once if the source is local, save those of tars, and else as they are read.

    >>> data = load_stream(DataConfig(source="sklearn:digits", image_size=8, channels=1, validation_count=97))
    >>> len(data.train.shards), data.validation.images.shape
    (1797, torch.Size([97, 1, 8, 8]))
    """
    splits = open_shards(config.source, config.config)
    train = narrow(pick_split(splits, config.train_split, "train_split"), config)
    if config.validation_split is None:
        rows, held = hold_out(train, config.validation_count)
        if not has_more(train, held):
            raise too_few(config.validation_count, len(rows))
        stream = other = ImageStream(train, config, classes, held)
    else:
        stream = ImageStream(train, config, classes)
        other = ImageStream(
            narrow(pick_split(splits, config.validation_split, "validation_split"), config), config, classes
        )
        rows, _ = hold_out(other.shards, config.validation_count)
    check_whole(stream)
    return StreamData(stream, decode_rows(other, rows))


def hold_out(shards: Shards, count: int) -> tuple[list[tuple[str, Raw]], dict[int, int]]:
    """Named rows to hold out, and how many that is at the start of each shard."""
    if isinstance(shards, TableShards):
        numbers = spread(len(shards), count)
        return [(shards.name(row, 0), shards.table.row(row)) for row in numbers], dict.fromkeys(numbers, 1)
    rows: list[tuple[str, Raw]] = []
    held = {}
    for shard in range(len(shards)):
        found = islice(shards.read(shard), count - len(rows))
        named = [(shards.name(shard, row), raw) for row, raw in enumerate(found)]
        rows, held[shard] = rows + named, len(named)
        if len(rows) == count:
            break
    return rows, held


def has_more(shards: Shards, held: dict[int, int]) -> bool:
    """Whether there are rows besides those held out."""
    # From the end, because they are held out at the start.
    starts = ((shard, held.get(shard, 0)) for shard in reversed(range(len(shards))))
    return any(next(shards.read(shard, start), None) is not None for shard, start in starts)


def check_whole(stream: ImageStream) -> None:
    """Check all labels and captions that can be had without reading the pictures."""
    columns = side_columns(stream.config)
    for names, values in stream.shards.values(columns) if columns else ():
        read_sides(stream.shards, stream.config, stream.classes, names, values.__getitem__)


def decode_rows(stream: ImageStream, rows: list[tuple[str, Raw]]) -> ImageSet:
    """Rows of a stream as a set in memory."""
    config, names = stream.config, [name for name, _ in rows]
    if not rows:
        raise DataError(f"data.validation_split: the split {config.validation_split!r} is empty")
    sides = stream.sides(names, [raw for _, raw in rows])
    broken = BrokenImages(config.source)
    plan = Plan(names, (raw[config.image_column] for _, raw in rows), sides)
    images = decode_plan(plan, config, broken)
    # A single broken image says little about a source of which only these few were read; but one must remain.
    broken.check(len(rows), allowed=min(1, len(rows) - 1))
    broken.report(len(rows))
    return images
