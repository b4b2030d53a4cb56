"""Which columns a recipe takes, and whether labels and captions are what it can be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import DataConfig
from .errors import DataError, closest_of, first_few
from .tables import Table

Captions = tuple[str, ...]


def narrow(table: Table, config: DataConfig) -> Table:
    """The table with the recipe's columns only; raises DataError where there are none of these names."""
    check_columns(table.columns, config)
    others = [name for name in (config.label_column, config.caption_column) if name is not None]
    return table.narrow(config.image_column, others)


def check_columns(columns: Sequence[str], config: DataConfig) -> None:
    """Raise, before anything is decoded, where the recipe names columns that do not exist."""
    for key in ("image_column", "label_column", "caption_column"):
        name = getattr(config, key)
        if name is not None and name not in columns:
            raise DataError(f"data.{key}: there is no column {name!r}{closest_of(name, columns)}")


@dataclass(frozen=True)
class Annotations:
    """The labels and captions of some rows, where the recipe asks for them. Shape: labels (N,), int64."""

    labels: Tensor | None
    captions: tuple[Captions, ...] | None

    def keep(self, rows: list[int]) -> Annotations:
        """Those of some of the rows."""
        labels = None if self.labels is None else self.labels[rows]
        captions = None if self.captions is None else tuple(self.captions[row] for row in rows)
        return Annotations(labels, captions)


def read_annotations(
    table: Table, config: DataConfig, classes: int | None, rows: Sequence[int], names: Sequence[str]
) -> Annotations:
    """Check what the rows, which messages call by these names, have in the recipe's columns."""
    labels = captions = None
    if (column := config.label_column) is not None:
        kind = f"the column {column!r} holds {table.kind(column)}"
        labels = read_labels(table.values(column, rows), names, kind=kind, classes=classes)
    if (column := config.caption_column) is not None:
        kind = f"the column {column!r} holds {table.kind(column)}"
        captions = read_captions(table.values(column, rows), names, kind=kind)
    return Annotations(labels, captions)


def read_labels(values: Sequence[Any], names: Sequence[str], *, kind: str, classes: int | None) -> Tensor:
    """Whole numbers, each that of a class. Shape: (len(values),), int64."""
    wrong = [name for name, value in zip(names, values, strict=True) if not isinstance(value, int)]
    if wrong:
        raise DataError(f"data.label_column: {kind}, not whole numbers ({first_few(wrong, len(wrong))})")
    labels = torch.tensor(values, dtype=torch.int64)
    check_labels(labels, names, classes)
    return labels


def check_labels(labels: Tensor, names: Sequence[str], classes: int | None) -> None:
    """Raise where a label is not that of a class, or is negative."""
    outside = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    if outside.any():
        rows = outside.nonzero().flatten().tolist()
        few = first_few((f"{names[row]}: {labels[row]}" for row in rows), len(rows))
        allowed = "must not be negative" if classes is None else f"must lie in 0 … {classes - 1}"
        raise DataError(f"data.label_column: labels {allowed} ({few})")


def read_captions(values: Sequence[Any], names: Sequence[str], *, kind: str) -> tuple[Captions, ...]:
    """The captions of each row, of which none is empty."""
    captions = tuple(map(as_captions, values))
    wrong = [name for name, several in zip(names, captions, strict=True) if several is None]
    if wrong:
        raise DataError(f"data.caption_column: {kind}, not a text or a list of texts ({first_few(wrong, len(wrong))})")
    found = tuple(several or () for several in captions)
    empty = [
        name for name, several in zip(names, found, strict=True) if not several or not all(map(str.strip, several))
    ]
    if empty:
        raise DataError(f"data.caption_column: there are empty captions ({first_few(empty, len(empty))})")
    return found


def as_captions(value: Any) -> Captions | None:
    """A row's captions; None if it holds something else than texts.

    >>> as_captions("a dog"), as_captions(["a dog", "an animal"]), as_captions(None), as_captions(3)
    (('a dog',), ('a dog', 'an animal'), (), None)
    """
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if not isinstance(value, (list, tuple)):
        return None
    texts = tuple("" if text is None else text for text in value)
    return texts if all(isinstance(text, str) for text in texts) else None
