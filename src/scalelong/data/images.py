"""Images of a dataset, decoded once to uint8 and kept in memory, with some of them held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .broken import BrokenImages
from .columns import Sides, narrow, read_sides
from .config import DataConfig
from .decoding import decode, ordered_map, row_name
from .errors import DataError
from .examples import Picked, caption_of
from .sources import open_tables, pick_split
from .tables import Table

__all__ = ["DataError", "ImageData", "ImageSet", "Progress", "load_images"]

# Called with the number of decoded images and their total.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ImageSet:
    """Images in memory, perhaps with labels and captions. Shape: images (N, C, H, W), uint8; labels (N,), int64."""

    images: Tensor
    labels: Tensor | None = None
    captions: tuple[tuple[str, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def pick(self, indices: Tensor, seeds: Tensor) -> Picked:
        """Some of the images, with one caption drawn for each. Shape: (B,), (B,) → (B, C, H, W)."""
        labels = None if self.labels is None else self.labels.index_select(0, indices)
        captions = None
        if self.captions is not None:
            drawn = zip((self.captions[index] for index in indices.tolist()), seeds.tolist(), strict=True)
            captions = tuple(several[caption_of(seed, len(several))] for several, seed in drawn)
        return Picked(self.images.index_select(0, indices), labels, captions=captions)


@dataclass(frozen=True)
class ImageData:
    """The images to train on and those held out; no image is in both."""

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
    parts = [(narrow(table, config), rows) for table, rows in choose_rows(config)]
    plans = [plan_rows(table, rows, config, classes) for table, rows in parts]
    broken, total = BrokenImages(config.source), sum(len(plan.names) for plan in plans)
    report = counter(total, progress)
    train, validation = (decode_plan(plan, config, broken, report) for plan in plans)
    broken.check(total)
    broken.report(total)
    return ImageData(train, validation)


def choose_rows(config: DataConfig) -> list[tuple[Table, Sequence[int]]]:
    """The rows to train on and those held out, each with its table."""
    tables = open_tables(config.source, config.config)
    train = not_empty(pick_split(tables, config.train_split, "train_split"), config.train_split, "train_split")
    if config.validation_split is None:
        return divide(train, config)
    other = not_empty(
        pick_split(tables, config.validation_split, "validation_split"), config.validation_split, "validation_split"
    )
    return [(train, range(len(train))), (other, spread(len(other), config.validation_count))]


def not_empty(table: Table, name: str, key: str) -> Table:
    if not len(table):
        raise DataError(f"data.{key}: the split {name!r} is empty")
    return table


def divide(table: Table, config: DataConfig) -> list[tuple[Table, Sequence[int]]]:
    """One table as training and validation rows."""
    if config.validation_count >= len(table):
        raise too_few(config.validation_count, len(table))
    held = spread(len(table), config.validation_count)
    kept = sorted(set(range(len(table))) - set(held))
    return [(table, kept), (table, held)]


def too_few(validation: int, size: int) -> DataError:
    return DataError(f"data.validation_count: holding out {validation} of {size} images leaves none to train on")


def spread(size: int, count: int) -> Sequence[int]:
    """`count` rows (all, if there are fewer) at even distances, so that a table sorted by class gives all classes.

    >>> spread(10, 4)
    [0, 2, 5, 7]
    """
    count = min(size, count)
    return [row * size // count for row in range(count)]


def counter(total: int, progress: Progress | None) -> Callable[[], None]:
    """A function to call after each decoded image."""
    done = 0

    def report() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return report


@dataclass(frozen=True)
class Plan:
    """Pictures to be decoded in order, with the names of their rows and with their labels and captions."""

    names: Sequence[str]
    pictures: Iterable[Any]
    sides: Sides

    def keep(self, images: Tensor, kept: list[int]) -> ImageSet:
        """The set of the rows at these positions, whose images those are."""
        labels, captions = self.sides.labels, self.sides.captions
        if len(kept) == len(self.names):
            return ImageSet(images, labels, captions)
        labels = None if labels is None else labels[kept]
        captions = None if captions is None else tuple(captions[position] for position in kept)
        return ImageSet(images, labels, captions)


def plan_rows(table: Table, rows: Sequence[int], config: DataConfig, classes: int | None) -> Plan:
    """Some rows of a table; their labels and captions are read, and refused, before anything is decoded."""
    names = [f"row {row}" for row in rows]
    sides = read_sides(table, config, classes, names, lambda column: table.values(column, rows))
    return Plan(names, (raw[config.image_column] for raw in table.rows(rows)), sides)


def decode_plan(
    plan: Plan, config: DataConfig, broken: BrokenImages, report: Callable[[], None] = lambda: None
) -> ImageSet:
    """Decode in several threads; what cannot be read is left out and told to `broken`."""
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
        report()
    return plan.keep(images[: len(kept)], kept)
