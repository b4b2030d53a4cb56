"""Splits with random access: scikit-learn's digits, what the `datasets` library holds, and zips of images."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from .errors import DataError, first_line, missing_extra

DIGITS = "sklearn:digits"

# A row by column; its picture is not opened yet: `open_picture` knows the forms it may have.
Raw = dict[str, Any]


class Table(Protocol):
    """One split of a dataset."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def kind(self, column: str) -> str:
        """What a column holds, for messages."""
        ...

    def narrow(self, image: str, others: Sequence[str]) -> Table:
        """Only these columns, the pictures not opened; raises DataError if the first holds none."""
        ...

    def row(self, index: int) -> Raw: ...

    def rows(self, indices: Sequence[int]) -> Iterator[Raw]: ...

    def values(self, column: str, indices: Sequence[int]) -> list[Any]: ...


class ListTable:
    """A table whose columns are sequences in memory."""

    def __init__(self, columns: dict[str, Sequence[Any]]) -> None:
        self._columns = columns

    @property
    def columns(self) -> Sequence[str]:
        return list(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def kind(self, column: str) -> str:
        return f"{type(self._columns[column][0]).__name__} values"

    def narrow(self, image: str, others: Sequence[str]) -> Table:
        if isinstance(self._columns[image][0], int):
            raise not_images(image, self.kind(image))
        return ListTable({name: self._columns[name] for name in (image, *others)})

    def row(self, index: int) -> Raw:
        return {name: values[index] for name, values in self._columns.items()}

    def rows(self, indices: Sequence[int]) -> Iterator[Raw]:
        return map(self.row, indices)

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
    columns: dict[str, Sequence[Any]] = {"image": [ZipMember(archive, name) for name in names]}
    folders = [PurePosixPath(name).parent for name in names]
    classes = sorted({folder.name for folder in folders})
    if len(classes) > 1 and len({len(folder.parts) for folder in folders}) == 1:
        columns["label"] = [classes.index(folder.name) for folder in folders]
    return ListTable(columns)


def is_image(name: str) -> bool:
    """Whether a file of an archive is named as an image; what macOS adds to archives is none."""
    from PIL import Image

    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__MACOSX")) for part in path.parts)
    return not hidden and Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN


class HubTable:
    """A split as the `datasets` library holds it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.columns: Sequence[str] = dataset.column_names

    def __len__(self) -> int:
        return len(self._dataset)

    def kind(self, column: str) -> str:
        return str(self._dataset.features[column])

    def narrow(self, image: str, others: Sequence[str]) -> Table:
        return HubTable(undecoded(self._dataset, image, others))

    def row(self, index: int) -> Raw:
        return self._dataset[index]

    def rows(self, indices: Sequence[int]) -> Iterator[Raw]:
        for batch in self._dataset.select(indices).iter(batch_size=256):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))

    def values(self, column: str, indices: Sequence[int]) -> list[Any]:
        return list(self._dataset.select_columns(column).select(indices)[column])


def undecoded(dataset: Any, image: str, others: Sequence[str]) -> Any:
    """Some columns of a dataset, whether streamed or not; a picture that cannot be opened must be ours to name."""
    from datasets import Image

    feature = dataset.features[image]
    if isinstance(feature, Image):
        dataset = dataset.cast_column(image, Image(decode=False))
    elif not may_hold_images(feature):
        raise not_images(image, str(feature))
    return dataset.select_columns(list(dict.fromkeys([image, *others])))


def may_hold_images(feature: Any) -> bool:
    """Whether a column that is not declared as images may be one all the same: bytes, paths, or both."""
    if isinstance(feature, dict):
        return "bytes" in feature or "path" in feature
    return getattr(feature, "dtype", None) in {"binary", "large_binary", "string", "large_string"}


def not_images(column: str, kind: str) -> DataError:
    return DataError(f"data.image_column: the column {column!r} holds {kind}, not images")
