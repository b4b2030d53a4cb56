"""The images of a dataset: which rows are trained on, which are for validation, and what their columns hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batches import Picked, caption_of
from .config import DataConfig
from .decode import decode, ordered_map, row_name
from .errors import BrokenImages, DataError, closest_of, first_few
from .sources import Table, open_tables, pick_split

# Called with the number of decoded images and their total.
Progress = Callable[[int, int], None]

Captions = tuple[str, ...]


@dataclass(frozen=True)
class ImageSet:
    """Images in memory, perhaps with labels and captions. Shape: images (N, C, H, W), uint8; labels (N,), int64."""

    images: Tensor
    labels: Tensor | None = None
    captions: Sequence[Captions] | None = None

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


class ImageData(NamedTuple):
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


def decode_parts(parts: Sequence[Part], progress: Progress | None = None) -> ImageData:
    """All images of both parts, in memory."""
    # Labels and captions of both are checked before the first image is decoded.
    annotations = [part.annotations(part.rows) for part in parts]
    source, total, done = parts[0].config.source, sum(len(part.rows) for part in parts), 0
    broken = BrokenImages(source)

    def count() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    sets = [part.decode(part.rows, broken, count, notes) for part, notes in zip(parts, annotations, strict=True)]
    broken.check(total)
    broken.report(total)
    return ImageData(*sets)


@dataclass(frozen=True)
class Annotations:
    """The labels and captions of some rows, where the recipe asks for them. Shape: labels (N,), int64."""

    labels: Tensor | None
    captions: tuple[Captions, ...] | None


@dataclass(frozen=True)
class Part:
    """The rows of a table to train on, or those for validation, with the columns that `config` names."""

    table: Table
    rows: Sequence[int]
    config: DataConfig
    classes: int | None = None

    def annotations(self, rows: Sequence[int]) -> Annotations:
        """What some rows have beside their images; raises DataError where labels or captions cannot be used."""
        names, table, labels, captions = [f"row {row}" for row in rows], self.table, None, None
        if (column := self.config.label_column) is not None:
            labels = read_labels(table.values(column, rows), names, self.classes, table.describe(column))
        if (column := self.config.caption_column) is not None:
            captions = read_captions(table.values(column, rows), names, table.describe(column))
        return Annotations(labels, captions)

    def decode(
        self,
        rows: Sequence[int],
        broken: BrokenImages,
        count: Callable[[], None] = lambda: None,
        annotations: Annotations | None = None,
    ) -> ImageSet:
        """Decode in several threads; what cannot be read is left out and added to `broken`."""
        known, config = annotations or self.annotations(rows), self.config
        pictures = (raw[config.image_column] for raw in self.table.rows(rows))
        named = ((row_name(f"row {row}", picture), picture) for row, picture in zip(rows, pictures, strict=True))
        images = torch.empty(len(rows), *config.image_shape, dtype=torch.uint8)
        kept: list[int] = []
        decoded = ordered_map(lambda pair: (pair[0], decode(*pair, config)), named, config.workers)
        for position, (name, pixels) in enumerate(decoded):
            if isinstance(pixels, str):
                broken.found.append((name, pixels))
            else:
                # Without gaps: to close one later would take the memory of all images again.
                images[len(kept)] = pixels
                kept.append(position)
            count()
        labels = None if known.labels is None else known.labels[kept]
        captions = None if known.captions is None else tuple(known.captions[row] for row in kept)
        return ImageSet(images[: len(kept)], labels, captions)


def open_parts(config: DataConfig, classes: int | None = None) -> list[Part]:
    """What there is to train on, and for validation; raises DataError where a split or column does not exist."""
    tables = open_tables(config.source, config.config)
    train = pick_split(tables, config.train_split, "train_split")
    size, count = len(train), config.validation_count
    if config.validation_split is not None:
        validation = pick_split(tables, config.validation_split, "validation_split")
        chosen = [(train, range(size)), (validation, spread(len(validation), count))]
    elif count < size:
        taken = spread(size, count)
        chosen = [(train, sorted(set(range(size)) - set(taken))), (train, taken)]
    else:
        taking = f"taking {count} of {size} images for validation leaves none to train on"
        raise DataError(f"data.validation_count: {taking}")
    return [Part(narrow(table, config), rows, config, classes) for table, rows in chosen]


def spread(size: int, count: int) -> Sequence[int]:
    """`count` rows (all, if there are fewer) at even distances, so that a table sorted by class gives all classes.

    >>> spread(10, 4)
    [0, 2, 5, 7]
    """
    count = min(size, count)
    return [row * size // count for row in range(count)]


def narrow(table: Table, config: DataConfig) -> Table:
    """The table with the recipe's columns only; raises DataError where there are none of these names."""
    keys = ("image_column", "label_column", "caption_column")
    named = {key: name for key in keys if (name := getattr(config, key)) is not None}
    for key, name in named.items():
        if name not in table.columns:
            raise DataError(f"data.{key}: there is no column {name!r}{closest_of(name, table.columns)}")
    image, *others = named.values()
    return table.narrow(image, others)


def read_labels(values: Sequence[Any], names: Sequence[str], classes: int | None, column: str) -> Tensor:
    """Whole numbers, each that of a class; `column` says what the column holds. Shape: (len(values),), int64."""
    wrong = [name for name, value in zip(names, values, strict=True) if not isinstance(value, int)]
    if wrong:
        raise DataError(f"data.label_column: {column}, not whole numbers ({first_few(wrong)})")
    labels = torch.tensor(values, dtype=torch.int64)
    check_labels(labels, names, classes)
    return labels


def check_labels(labels: Tensor, names: Sequence[str], classes: int | None) -> None:
    """Raise where a label is not that of a class, or is negative."""
    outside = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    if outside.any():
        few = first_few([f"{names[row]}: {labels[row]}" for row in outside.nonzero().flatten().tolist()])
        allowed = "must not be negative" if classes is None else f"must lie in 0 … {classes - 1}"
        raise DataError(f"data.label_column: labels {allowed} ({few})")


def read_captions(values: Sequence[Any], names: Sequence[str], column: str) -> tuple[Captions, ...]:
    """The captions of each row, of which none is empty."""
    captions = tuple(map(as_captions, values))
    wrong = [name for name, several in zip(names, captions, strict=True) if several is None]
    if wrong:
        raise DataError(f"data.caption_column: {column}, not a text or a list of texts ({first_few(wrong)})")
    found = tuple(several or () for several in captions)
    empty = [name for name, several in zip(names, found, strict=True) if not all(map(str.strip, several or ("",)))]
    if empty:
        raise DataError(f"data.caption_column: there are empty captions ({first_few(empty)})")
    return found


def as_captions(value: Any) -> Captions | None:
    """A row's captions; None if it holds something else than texts.

    >>> as_captions("a dog"), as_captions(["a dog", "an animal"]), as_captions(None), as_captions(3)
    (('a dog',), ('a dog', 'an animal'), (), None)
    """
    if value is not None and not isinstance(value, (str, list, tuple)):
        return None
    several = (value,) if isinstance(value, str) else value or ()
    texts = tuple("" if text is None else text for text in several)
    return texts if all(isinstance(text, str) for text in texts) else None
