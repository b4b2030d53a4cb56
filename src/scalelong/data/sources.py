"""Where pictures come from: scikit-learn's digits, the Hugging Face hub, parquet, tars, zips and image folders.

Whatever they are, they become tables: splits with random access, either a ListTable or a HubTable.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..utils.block_folder import Fingerprint
from .config import DataConfig, DataError, first_line
from .folders import FILES, TARS, check_tars, folder_splits, neighbour_of, walk, zip_columns

DIGITS = "sklearn:digits"

Captions = tuple[str, ...]


class ListTable:
    """A split whose columns are sequences in memory; a row is a dict, whose picture `open_picture` opens."""

    def __init__(self, data: dict[str, Sequence[Any]]) -> None:
        self._data = data
        self.columns: Sequence[str] = list(data)

    def __len__(self) -> int:
        return len(self._data[self.columns[0]])

    def describe(self, column: str) -> str:
        """What a column holds, for messages."""
        return f"the column {column!r} holds {type(self._data[column][0]).__name__} values"

    def narrow(self, image: str, others: Sequence[str]) -> ListTable:
        """Only these columns, the pictures not opened; raises DataError if the first holds none."""
        if isinstance(self._data[image][0], int):
            raise DataError(f"data.image_column: {self.describe(image)}, not images")
        return ListTable({name: self._data[name] for name in (image, *others)})

    def rows(self, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        return ({name: values[index] for name, values in self._data.items()} for index in indices)

    def values(self, column: str, indices: Sequence[int]) -> list[Any]:
        return [self._data[column][index] for index in indices]


class HubTable:
    """A split as the `datasets` library holds it, with the methods of a ListTable.

    Its images are bytes; with `paths` rows may also name files of this machine.
    """

    def __init__(self, dataset: Any, *, paths: bool = False, image: str | None = None) -> None:
        self._dataset, self._paths, self._image = dataset, paths, image
        self.columns: Sequence[str] = dataset.column_names

    def __len__(self) -> int:
        return len(self._dataset)

    def describe(self, column: str) -> str:
        return f"the column {column!r} holds {self._dataset.features[column]}"

    def narrow(self, image: str, others: Sequence[str]) -> HubTable:
        from datasets import Image

        dataset, feature = self._dataset, self._dataset.features[image]
        if isinstance(feature, Image):
            # A picture that cannot be opened must be ours to name.
            dataset = dataset.cast_column(image, Image(decode=False))
        elif not may_hold_images(feature):
            raise DataError(f"data.image_column: {self.describe(image)}, not images")
        columns = list(dict.fromkeys([image, *others]))
        return HubTable(dataset.select_columns(columns), paths=self._paths, image=image)

    def rows(self, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        for batch in self._dataset.select(indices).iter(batch_size=256):
            for values in zip(*batch.values(), strict=True):
                row = dict(zip(batch, values, strict=True))
                if not self._paths and (named := file_named(row.get(self._image or ""))):
                    raise DataError(
                        f"data.source: a row names the file {named!r} instead of holding an image's bytes; who wrote "
                        "it could so have any file of this machine read. If you trust it: data.allow_paths: true"
                    )
                yield row

    def values(self, column: str, indices: Sequence[int]) -> list[Any]:
        return list(self._dataset.select_columns(column).select(indices)[column])


Table = ListTable | HubTable


def file_named(picture: Any) -> str | None:
    """The file that has a row's picture, where the row itself has not."""
    if isinstance(picture, dict):
        return picture.get("path") if picture.get("bytes") is None else None
    return picture if isinstance(picture, str) else None


def may_hold_images(feature: Any) -> bool:
    """Whether a column that is not declared as images may be one all the same: bytes, paths, or both."""
    if isinstance(feature, dict):
        return "bytes" in feature or "path" in feature
    return getattr(feature, "dtype", None) in {"binary", "large_binary", "string", "large_string"}


def local_path(source: str) -> Path | None:
    """Where a source's files are, or their pattern; None if it is a name. Raises DataError if they are not there."""
    path = Path(source).expanduser()
    if "*" in source:
        if not glob.glob(str(path)):
            raise DataError(f"data.source: there are no files {source!r} (looked for {os.path.abspath(path)})")
    elif not path.exists():
        if source.startswith("sklearn:") and source != DIGITS:
            raise DataError(f"data.source: {source!r} is not known; of scikit-learn's datasets only {DIGITS!r} is")
        # `name` or `owner/name` may be a dataset on the hub.
        if source[0] in "./~" or source.count("/") > 1 or path.suffix.lower() in FILES:
            looked = f"looked for {os.path.abspath(path)}{neighbour_of(path)}"
            raise DataError(f"data.source: {source!r} was not found ({looked})")
        return None
    return path


def open_tables(source: str, config: str | None = None, *, allow_paths: bool = False) -> dict[str, Table]:
    """The splits of a source by name; see DataConfig for what a source and its config may be."""
    path = local_path(source)
    if config is not None and (source == DIGITS or (path is not None and not path.is_dir())):
        raise DataError(f"data.config: {source!r} has no configurations to choose from; leave it out")
    if source == DIGITS:
        return {"train": digits_table()}
    if path is not None and path.is_file() and path.suffix == ".zip":
        return {"train": ListTable(zip_columns(path))}
    if path is not None and path.is_dir() and config is None and (splits := folder_splits(path)) is not None:
        return {name: ListTable(columns) for name, columns in splits.items()}
    builder = open_builder(source, config)
    with quiet_library(source):
        if path is not None and not os.path.exists(builder.cache_dir):
            check_tars(path)
        builder.download_and_prepare()
        # A folder of images becomes a table of their paths, which the library found itself.
        paths = allow_paths or builder.name == "imagefolder"
        return {name: HubTable(split, paths=paths) for name, split in builder.as_dataset().items()}


def pick_split(tables: Mapping[str, Table], name: str, key: str) -> Table:
    """The split of this name, which must hold something; `key` is what errors put it down to."""
    if name not in tables:
        raise DataError(f"data.{key}: there is no split {name!r}{closest_of(name, tables)}")
    if not len(tables[name]):
        raise DataError(f"data.{key}: the split {name!r} is empty")
    return tables[name]


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
    """The captions of each row, a text or several, of which none is empty.

    >>> read_captions(["a dog", ["a dog", "an animal"]], ["row 0", "row 1"], "the column 'text'")
    (('a dog',), ('a dog', 'an animal'))
    """
    rows: list[Any] = [(value,) if value is None or isinstance(value, str) else value for value in values]
    wrong = [name for name, row in zip(names, rows, strict=True) if not are_texts(row)]
    if wrong:
        raise DataError(f"data.caption_column: {column}, not a text or a list of texts ({first_few(wrong)})")
    empty = [
        name for name, row in zip(names, rows, strict=True) if not all(text and text.strip() for text in row or [""])
    ]
    if empty:
        raise DataError(f"data.caption_column: there are empty captions ({first_few(empty)})")
    return tuple(map(tuple, rows))


def are_texts(row: Any) -> bool:
    return isinstance(row, (list, tuple)) and all(text is None or isinstance(text, str) for text in row)


def images_fingerprint(data: DataConfig) -> Fingerprint:
    """What the decoded images of a recipe depend on; nothing is read for it but the names of the files."""
    keys = ["config", "train_split", "validation_split", "validation_count", "image_size", "channels", "fit"]
    keys += ["image_column", "label_column", "caption_column", *box_key(data)]
    path = local_path(data.source)
    # Relative to where the command was given, of which there are many.
    source = data.source if path is None else str(path.absolute())
    fingerprint: Fingerprint = {"data.source": source, "data.files": source_hash(data.source, data.config)}
    return fingerprint | {f"data.{key}": getattr(data, key) for key in keys}


def box_key(data: DataConfig) -> list[str]:
    """None without a box, so that folders keep the names they had before there were any."""
    return [] if data.box is None else ["box"]


def source_hash(source: str, config: str | None = None) -> str:
    """What tells whether a source has changed, without reading it: names, sizes and times of its files.

    Of a dataset on the hub it is the version that the hub, or the cache of the `datasets` library, has now.
    """
    digest, path = hashlib.sha256(), local_path(source)
    files: list[tuple[str, os.stat_result]] = []
    if path is not None and path.is_dir():
        files = [(file.path[len(str(path)) :], file.stat()) for file in walk(path)]
    elif path is not None:
        names = sorted(glob.glob(str(path))) if "*" in source else [str(path)]
        files = [(name, os.stat(name)) for name in names]
    elif source != DIGITS:
        digest.update(str(open_builder(source, config).cache_dir).encode())
    for name, status in files:
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def short_hash(fingerprint: Fingerprint) -> str:
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:8]


def digits_table() -> ListTable:
    """scikit-learn's 1797 handwritten digits of 8×8, which come with the library; grey levels 0 … 16 become 0 … 255."""
    digits = import_extra("sklearn.datasets", f"the data {DIGITS!r}", "scikit-learn").load_digits()
    return ListTable({"image": (digits.images * (255 / 16)).round().astype("uint8"), "label": digits.target.tolist()})


def open_builder(source: str, config: str | None) -> Any:
    """What the library knows of files, of a folder or of a dataset on the hub before it reads them."""
    path = local_path(source)
    with quiet_library(source) as datasets:
        if path is not None and not path.is_dir():
            kind = "webdataset" if path.suffix in TARS else "parquet"
            return datasets.load_dataset_builder(kind, data_files={"train": str(path)})
        # A relative path may be the name of one of the library's own formats, which alone would read what lies around.
        if path is None and source in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
            raise DataError(f"data.source: {source!r} is a format, not a data set: name a folder, a file or a pattern")
        name = source if path is None else str(path.absolute())
        try:
            return datasets.load_dataset_builder(name, name=config)
        except ValueError:
            check_config(datasets, name, config)
            raise


def check_config(datasets: Any, path: str, config: str | None) -> None:
    """Raise DataError if that is why a set cannot be opened: it has no such configuration, or one must be chosen."""
    try:
        names = datasets.get_dataset_config_names(path)
    except Exception:  # As there.
        return
    if config is None and len(names) > 1:
        raise DataError(f"data.config: {path!r} has {len(names)} configurations: choose one of {', '.join(names)}")
    if config is not None and config not in names:
        raise DataError(f"data.config: {path!r} has no configuration {config!r}{closest_of(config, names)}")


@contextmanager
def quiet_library(source: str) -> Iterator[Any]:
    """The library without progress bars, its errors told as ours; what the user had chosen is restored."""
    datasets = import_extra("datasets", f"the data {source!r}")
    # Before version 4 the library asked on the terminal whether it may run the code of a set; it never may.
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    except (DataError, MemoryError, ImportError):
        raise
    except Exception as error:  # Damaged files make the library raise a dozen kinds of errors.
        raise DataError(f"data.source: {source!r} {reason_of(source, error)}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def reason_of(source: str, error: Exception) -> str:
    """Why a source cannot be opened, and what to do."""
    reason, instead = first_line(error), "or name a local folder or parquet file instead: --set data.source=PATH"
    if local_path(source) is not None:
        kinds = "neither a parquet file, a tar or a zip nor a folder of parquet files, tars or images that can be read"
        return f"is {kinds}: {reason}"
    if isinstance(error, ConnectionError):
        where = "is neither a path here nor in the cache, and the Hugging Face hub could not be reached"
        return f"{where} ({reason}). Try again online, {instead}"
    return f"could not be loaded from the Hugging Face hub ({reason}). Check the name, {instead}"


def import_extra(module: str, needed_by: str, library: str | None = None) -> Any:
    """A module of an optional library; raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{needed_by} needs {library or module}: pip install 'scalelong[train]'") from error


def closest_of(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the closest name and the list of all."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} There are: {', '.join(names)}"


def first_few(names: list[str], shown: int = 5) -> str:
    """
    >>> first_few(["row 1", "row 4", "row 9"], shown=2)
    'row 1, row 4 and 1 more'
    """
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
