"""The images of a dataset: which rows are trained on and which are for validation, and all of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batches import Picked, caption_of
from .columns import Annotations, Captions, narrow, read_annotations
from .config import DataConfig
from .decode import decode, ordered_map, row_name
from .errors import BrokenImages, DataError
from .sources import open_tables, pick_split
from .tables import Table

# Called with the number of decoded images and their total.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ImageSet:
    """Images in memory, perhaps with labels and captions. Shape: images (N, C, H, W), uint8; labels (N,), int64."""

    images: Tensor
    labels: Tensor | None = None
    captions: tuple[Captions, ...] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def pick(self, indices: Tensor, seeds: Tensor) -> Picked:
        """Some of the images, with one caption chosen for each. Shape: (B,), (B,) → (B, C, H, W)."""
        labels = None if self.labels is None else self.labels.index_select(0, indices)
        captions = None
        if self.captions is not None:
            chosen = zip((self.captions[index] for index in indices.tolist()), seeds.tolist(), strict=True)
            captions = tuple(several[caption_of(seed, len(several))] for several, seed in chosen)
        return Picked(self.images.index_select(0, indices), labels, captions=captions)


@dataclass(frozen=True)
class ImageData:
    """The images to train on and those for validation; no image is in both."""

    train: ImageSet
    validation: ImageSet


def load_images(config: DataConfig, *, classes: int | None = None, progress: Progress | None = None) -> ImageData:
    """Decode every image that the configuration asks for; raises DataError where it asks for what is not there.

    With `classes`, labels must lie in 0 … classes - 1. Images that cannot be read are left out with their labels and
    captions, and named in a warning; more than 1 % of them are an error.

    >>> data = load_images(DataConfig(source="sklearn:digits", image_size=8, channels=1, validation_count=97))
    >>> data.train.images.shape, data.validation.images.shape
    (torch.Size([1700, 1, 8, 8]), torch.Size([97, 1, 8, 8]))
    """
    return decode_parts(open_parts(config, classes), progress)


@dataclass(frozen=True)
class Part:
    """The rows of a table to train on, or those for validation, with the columns that `config` names."""

    table: Table
    rows: Sequence[int]
    config: DataConfig
    classes: int | None = None

    def plan(self, rows: Sequence[int] | None = None) -> Plan:
        """Some of the rows, else all; raises DataError where labels or captions cannot be used."""
        return plan_rows(self.table, self.rows if rows is None else rows, self.config, self.classes)


def open_parts(config: DataConfig, classes: int | None = None) -> list[Part]:
    """What there is to train on, and for validation."""
    return [Part(narrow(table, config), rows, config, classes) for table, rows in choose_rows(config)]


def decode_parts(parts: Sequence[Part], progress: Progress | None = None) -> ImageData:
    """All images of both parts, in memory."""
    # Both are checked before the first image is decoded.
    plans = [part.plan() for part in parts]
    config, total, done = parts[0].config, sum(len(plan.names) for plan in plans), 0
    broken = BrokenImages(config.source)

    def count() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    train, validation = (decode_plan(plan, config, broken, count) for plan in plans)
    broken.check(total)
    broken.report(total)
    return ImageData(train, validation)


def choose_rows(config: DataConfig) -> list[tuple[Table, Sequence[int]]]:
    """The rows to train on and those for validation, each with its table."""
    tables = open_tables(config.source, config.config)
    train = pick_split(tables, config.train_split, "train_split")
    if config.validation_split is not None:
        other = pick_split(tables, config.validation_split, "validation_split")
        return [(train, range(len(train))), (other, spread(len(other), config.validation_count))]
    size, count = len(train), config.validation_count
    if count >= size:
        raise DataError(
            f"data.validation_count: taking {count} of {size} images for validation leaves none to train on"
        )
    taken = spread(size, count)
    return [(train, sorted(set(range(size)) - set(taken))), (train, taken)]


def spread(size: int, count: int) -> Sequence[int]:
    """`count` rows (all, if there are fewer) at even distances, so that a table sorted by class gives all classes.

    >>> spread(10, 4)
    [0, 2, 5, 7]
    """
    count = min(size, count)
    return [row * size // count for row in range(count)]


@dataclass(frozen=True)
class Plan:
    """Pictures to be decoded in order, with the names of their rows, their labels and captions."""

    names: Sequence[str]
    pictures: Iterable[Any]
    annotations: Annotations


def plan_rows(table: Table, rows: Sequence[int], config: DataConfig, classes: int | None) -> Plan:
    """Some rows of a table; their labels and captions are read, and refused, before anything is decoded."""
    names = [f"row {row}" for row in rows]
    annotations = read_annotations(table, config, classes, rows, names)
    return Plan(names, (raw[config.image_column] for raw in table.rows(rows)), annotations)


def decode_plan(
    plan: Plan, config: DataConfig, broken: BrokenImages, count: Callable[[], None] = lambda: None
) -> ImageSet:
    """Decode in several threads; what cannot be read is left out and told to `broken`; `count` is called for each."""
    named = ((row_name(name, picture), picture) for name, picture in zip(plan.names, plan.pictures, strict=True))
    decoded = ordered_map(lambda pair: (pair[0], decode(*pair, config)), named, config.workers)
    images = torch.empty(len(plan.names), *config.image_shape, dtype=torch.uint8)
    kept = []
    for position, (name, pixels) in enumerate(decoded):
        if isinstance(pixels, str):
            broken.add(name, pixels)
        else:
            # Without gaps: to close one later would take the memory of all images again.
            images[len(kept)] = pixels
            kept.append(position)
        count()
    annotations = plan.annotations if len(kept) == len(plan.names) else plan.annotations.keep(kept)
    return ImageSet(images[: len(kept)], annotations.labels, annotations.captions)
