"""Splits with random access: scikit-learn's digits, folders and zips of images, and what `datasets` holds."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from .errors import DataError, first_line, missing_extra

DIGITS = "sklearn:digits"

TARS = {".tar", ".tgz", ".gz"}
FILES = {".parquet", ".zip", *TARS}
METADATA = {".csv", ".jsonl"}

# The words in the names of folders or files by which `datasets` tells splits apart.
SPLITS = {
    split: re.compile(rf"(^|[-._ 0-9])({words})([-._ 0-9]|$)")
    for split, words in (
        ("train", "train|training"),
        ("validation", "validation|valid|dev|val"),
        ("test", "test|testing|eval|evaluation"),
    )
}

# A row by column; its picture is not opened yet: `open_picture` knows the forms it may have.
Raw = dict[str, Any]


class ListTable:
    """A split whose columns are sequences in memory."""

    def __init__(self, columns: dict[str, Sequence[Any]]) -> None:
        self._columns = columns

    @property
    def columns(self) -> Sequence[str]:
        return list(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def kind(self, column: str) -> str:
        """What a column holds, for messages."""
        return f"{type(self._columns[column][0]).__name__} values"

    def narrow(self, image: str, others: Sequence[str]) -> ListTable:
        """Only these columns, the pictures not opened; raises DataError if the first holds none."""
        if isinstance(self._columns[image][0], int):
            raise not_images(image, self.kind(image))
        return ListTable({name: self._columns[name] for name in (image, *others)})

    def rows(self, indices: Sequence[int]) -> Iterator[Raw]:
        return ({name: values[index] for name, values in self._columns.items()} for index in indices)

    def values(self, column: str, indices: Sequence[int]) -> list[Any]:
        return [self._columns[column][index] for index in indices]


def digits_table() -> ListTable:
    """scikit-learn's 1797 handwritten digits of 8×8, which come with the library; grey levels 0 … 16 become 0 … 255."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_extra(DIGITS, "scikit-learn") from error
    digits: Any = load_digits()
    return ListTable({"image": (digits.images * (255 / 16)).round().astype("uint8"), "label": digits.target.tolist()})


@dataclass(frozen=True)
class ZipMember:
    """A file in an archive, read when it is needed; several threads may read at once."""

    archive: zipfile.ZipFile
    name: str

    def read(self) -> bytes:
        return self.archive.read(self.name)


def zip_table(path: Path) -> ListTable:
    """The images of a zip in the order of their names; folders, if there are several of the same depth, are classes."""
    # Not by the `datasets` library: it unpacks the archive, and takes the labels from the folder around it.
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"data.source: {str(path)!r} is not a zip that can be read: {first_line(error)}") from error
    names = sorted(name for name in archive.namelist() if is_image(name))
    if not names:
        raise DataError(f"data.source: there are no images in {str(path)!r}")
    labels = labels_of(names)
    pictures = [ZipMember(archive, name) for name in names]
    return ListTable({"image": pictures} if labels is None else {"image": pictures, "label": labels})


def folder_tables(folder: Path) -> dict[str, Table] | None:
    """The images of a folder by split, in the order of their names; None if it holds other data, or none."""
    # Not by the `datasets` library: it walks the folder 45 times. Rows, labels and splits are those it would give.
    names = sorted(file.path for file in walk(folder))
    roots = len(str(folder)) + 1
    if any(holds_data(name) for name in names):
        return None
    names = [name for name in names if is_image(name[roots:])]
    if not names:
        return None
    found = split_names([name[roots:] for name in names])
    # One list for all, because a class has the same number in every split.
    kept = sorted({row for rows in found.values() for row in rows})
    labels = labels_of([names[row] for row in kept])
    label_of = {} if labels is None else dict(zip(kept, labels, strict=True))
    tables: dict[str, Table] = {}
    for split, rows in found.items():
        columns: dict[str, Sequence[Any]] = {"image": [names[row] for row in rows]}
        tables[split] = ListTable(columns if labels is None else columns | {"label": [label_of[row] for row in rows]})
    return tables


def walk(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Every file below a folder in the order of names, none of them hidden, with one look at each folder."""
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if not entry.name.startswith((".", "__"))), key=lambda one: one.name)
    for entry in entries:
        if entry.is_dir():
            yield from walk(entry.path)
        elif entry.is_file():
            yield entry


def holds_data(name: str) -> bool:
    """Whether a file is none of an image folder that is read here: it holds rows, or says something about them."""
    path = PurePath(name)
    return path.suffix in FILES or path.name == "README.md" or (path.stem == "metadata" and path.suffix in METADATA)


def split_names(names: Sequence[str]) -> dict[str, list[int]]:
    """The positions of names by the split that their folders tell, else the files themselves; `train` if neither does.

    >>> split_names(["train/cat/0.png", "test/cat/1.png", "more/2.png"])
    {'train': [0], 'test': [1]}
    """
    for part in (lambda path: path.parts[:-1], lambda path: path.parts[-1:]):
        splits: dict[str, list[int]] = {}
        for position, name in enumerate(names):
            words = part(PurePath(name))
            for split, pattern in SPLITS.items():
                if any(map(pattern.search, words)):
                    splits.setdefault(split, []).append(position)
        if splits:
            return {split: splits[split] for split in SPLITS if split in splits}
    return {"train": list(range(len(names)))}


def labels_of(names: Sequence[str]) -> list[int] | None:
    """The class of each image, named by its folder; None unless there are several folders, all of the same depth.

    >>> labels_of(["cat/0.png", "dog/0.png", "cat/1.png"])
    [0, 1, 0]
    """
    folders = [PurePath(name).parent for name in names]
    classes = {name: number for number, name in enumerate(sorted({folder.name for folder in folders}))}
    if len(classes) == 1 or len({len(folder.parts) for folder in folders}) > 1:
        return None
    return [classes[folder.name] for folder in folders]


def is_image(name: str) -> bool:
    """Whether a file of an archive is named as an image; what macOS adds to archives is none."""
    from PIL import Image

    path = PurePath(name)
    hidden = any(part.startswith((".", "__MACOSX")) for part in path.parts)
    return not hidden and Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN


class HubTable:
    """A split as the `datasets` library holds it, with the methods of a ListTable."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.columns: Sequence[str] = dataset.column_names

    def __len__(self) -> int:
        return len(self._dataset)

    def kind(self, column: str) -> str:
        return str(self._dataset.features[column])

    def narrow(self, image: str, others: Sequence[str]) -> HubTable:
        """Some columns; a picture that cannot be opened must be ours to name."""
        from datasets import Image

        dataset, feature = self._dataset, self._dataset.features[image]
        if isinstance(feature, Image):
            dataset = dataset.cast_column(image, Image(decode=False))
        elif not may_hold_images(feature):
            raise not_images(image, str(feature))
        return HubTable(dataset.select_columns(list(dict.fromkeys([image, *others]))))

    def rows(self, indices: Sequence[int]) -> Iterator[Raw]:
        for batch in self._dataset.select(indices).iter(batch_size=256):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))

    def values(self, column: str, indices: Sequence[int]) -> list[Any]:
        return list(self._dataset.select_columns(column).select(indices)[column])


Table = ListTable | HubTable


def may_hold_images(feature: Any) -> bool:
    """Whether a column that is not declared as images may be one all the same: bytes, paths, or both."""
    if isinstance(feature, dict):
        return "bytes" in feature or "path" in feature
    return getattr(feature, "dtype", None) in {"binary", "large_binary", "string", "large_string"}


def not_images(column: str, kind: str) -> DataError:
    return DataError(f"data.image_column: the column {column!r} holds {kind}, not images")
