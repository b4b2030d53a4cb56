"""Images of a dataset, decoded once to uint8 and kept in memory, with some of them held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import DataConfig
from .pixels import to_pixels
from .sources import DataError, Table, closest_of, open_tables

__all__ = ["DataError", "ImageData", "ImageSet", "Progress", "load_images"]

# Called with the number of decoded images and their total.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ImageSet:
    """Images in memory. Shape: images (N, C, H, W), uint8; labels (N,), int64, or None."""

    images: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class ImageData:
    """The images to train on and those held out; no image is in both."""

    train: ImageSet
    heldout: ImageSet


def load_images(config: DataConfig, *, progress: Progress | None = None) -> ImageData:
    """Decode every image that the configuration asks for; raises DataError where it asks for what is not there.

    >>> data = load_images(DataConfig(source="sklearn:digits", image_size=8, channels=1, heldout_count=97))
    >>> data.train.images.shape, data.heldout.images.shape
    (torch.Size([1700, 1, 8, 8]), torch.Size([97, 1, 8, 8]))
    """
    tables = open_tables(config.source)
    train = pick_split(tables, config.train_split, "train_split")
    if config.heldout_split is None:
        parts = divide(train, config)
    else:
        other = pick_split(tables, config.heldout_split, "heldout_split")
        parts = [(train, range(len(train))), (other, spread(len(other), config.heldout_count))]
    for table, _ in parts:
        check_columns(table, config)
    report = counter(sum(len(rows) for _, rows in parts), progress)
    return ImageData(*(decode(table, rows, config, report) for table, rows in parts))


def pick_split(tables: dict[str, Table], name: str, key: str) -> Table:
    if name not in tables:
        raise DataError(f"data.{key}: there is no split {name!r}{closest_of(name, tables)}")
    if not len(tables[name]):
        raise DataError(f"data.{key}: the split {name!r} is empty")
    return tables[name]


def divide(table: Table, config: DataConfig) -> list[tuple[Table, Sequence[int]]]:
    """One table as training and held-out rows."""
    if config.heldout_count >= len(table):
        raise DataError(
            f"data.heldout_count: holding out {config.heldout_count} of {len(table)} images leaves none to train on"
        )
    held = spread(len(table), config.heldout_count)
    kept = sorted(set(range(len(table))) - set(held))
    return [(table, kept), (table, held)]


def spread(size: int, count: int) -> Sequence[int]:
    """`count` rows (all, if there are fewer) at even distances, so that a table sorted by class gives all classes.

    >>> spread(10, 4)
    [0, 2, 5, 7]
    """
    count = min(size, count)
    return [row * size // count for row in range(count)]


def check_columns(table: Table, config: DataConfig) -> None:
    """Raise, before anything is decoded, where the recipe names columns that do not exist."""
    for key, name in (("image_column", config.image_column), ("label_column", config.label_column)):
        if name is not None and name not in table.columns:
            raise DataError(f"data.{key}: there is no column {name!r}{closest_of(name, table.columns)}")


def counter(total: int, progress: Progress | None) -> Callable[[], None]:
    """A function to call after each decoded image."""
    done = 0

    def report() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return report


def decode(table: Table, rows: Sequence[int], config: DataConfig, report: Callable[[], None]) -> ImageSet:
    labels = None if config.label_column is None else table.labels(config.label_column, rows)
    images = torch.empty(len(rows), *config.image_shape, dtype=torch.uint8)
    pictures = table.pictures(config.image_column, rows)
    for row, image in zip(rows, images, strict=True):
        try:
            image.copy_(to_pixels(next(pictures), config))
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"image {row} of {config.source}: {error}") from error
        report()
    return ImageSet(images, labels)
