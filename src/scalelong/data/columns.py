"""Which columns a recipe takes, and whether labels and captions are what it can be trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .config import DataConfig
from .errors import DataError, closest_of, first_few

Captions = tuple[str, ...]
Narrowed = TypeVar("Narrowed", covariant=True)


class HasKinds(Protocol):
    """A table, or shards: something that knows what a column holds."""

    def kind(self, column: str) -> str: ...


class HasColumns(Protocol[Narrowed]):
    """A table, or shards: something that can be had with some of its columns only."""

    @property
    def columns(self) -> Sequence[str]: ...

    def narrow(self, image: str, others: Sequence[str]) -> Narrowed: ...


def narrow(source: HasColumns[Narrowed], config: DataConfig) -> Narrowed:
    """The source with the recipe's columns only; raises DataError where there are none of these names."""
    check_columns(source.columns, config)
    return source.narrow(config.image_column, side_columns(config))


def check_columns(columns: Sequence[str], config: DataConfig) -> None:
    """Raise, before anything is decoded, where the recipe names columns that do not exist."""
    for key in ("image_column", "label_column", "caption_column"):
        name = getattr(config, key)
        if name is not None and name not in columns:
            raise DataError(f"data.{key}: there is no column {name!r}{closest_of(name, columns)}")


def side_columns(config: DataConfig) -> list[str]:
    """The columns besides the image."""
    return [name for name in (config.label_column, config.caption_column) if name is not None]


@dataclass(frozen=True)
class Sides:
    """The labels and captions of some rows, where the recipe asks for them. Shape: labels (N,), int64."""

    labels: Tensor | None
    captions: tuple[Captions, ...] | None


def read_sides(
    source: HasKinds,
    config: DataConfig,
    classes: int | None,
    names: Sequence[str],
    values: Callable[[str], Sequence[Any]],
) -> Sides:
    """Check what `values` gives for the recipe's columns; `names` are those of the rows, `source` what they are of."""
    labels = captions = None
    if (column := config.label_column) is not None:
        kind = f"the column {column!r} holds {source.kind(column)}"
        labels = read_labels(values(column), names, kind=kind, classes=classes)
    if (column := config.caption_column) is not None:
        kind = f"the column {column!r} holds {source.kind(column)}"
        captions = read_captions(values(column), names, kind=kind)
    return Sides(labels, captions)


def read_labels(values: Sequence[Any], names: Sequence[str], *, kind: str, classes: int | None) -> Tensor:
    """Whole numbers, each that of a class. Shape: (len(values),), int64."""
    wrong = [name for name, value in zip(names, values, strict=True) if not isinstance(value, int)]
    if wrong:
        raise DataError(f"data.label_column: {kind}, not whole numbers ({first_few(wrong, len(wrong))})")
    labels = torch.tensor(values, dtype=torch.int64)
    outside = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    if outside.any():
        rows = outside.nonzero().flatten().tolist()
        few = first_few((f"{names[row]}: {values[row]}" for row in rows), len(rows))
        allowed = "must not be negative" if classes is None else f"must lie in 0 … {classes - 1}"
        raise DataError(f"data.label_column: labels {allowed} ({few})")
    return labels


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
