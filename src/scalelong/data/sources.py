"""Where pictures come from: scikit-learn's digits, the Hugging Face hub, parquet, tars, zips and image folders.

Whatever they are, they become tables: splits with random access, either a ListTable or a HubTable.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from .errors import DataError, closest_of, first_line, import_extra

DIGITS = "sklearn:digits"

TARS = {".tar", ".tgz", ".gz"}
FILES = {".parquet", ".zip", *TARS}
# In a folder of images, files that say something about them, or hold rows, are read by the `datasets` library.
METADATA = {"README.md", "metadata.csv", "metadata.jsonl"}

# The words in the names of folders or files by which `datasets` tells splits apart.
WORDS = {"train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation"}
SPLITS = {split: re.compile(rf"(^|[-._ 0-9])({words})([-._ 0-9]|$)") for split, words in WORDS.items()}


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
    """A split as the `datasets` library holds it, with the methods of a ListTable."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
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
        return HubTable(dataset.select_columns(list(dict.fromkeys([image, *others]))))

    def rows(self, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
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


def open_tables(source: str, config: str | None = None) -> dict[str, Table]:
    """The splits of a source by name; see DataConfig for what a source and its config may be."""
    path = Path(source).expanduser()
    if config is not None and (source == DIGITS or "*" in source or path.is_file()):
        raise DataError(f"data.config: {source!r} has no configurations to choose from; leave it out")
    if source == DIGITS:
        return {"train": digits_table()}
    if source.startswith("sklearn:"):
        raise DataError(f"data.source: {source!r} is not known; of scikit-learn's datasets only {DIGITS!r} is")
    if path.is_file() and path.suffix == ".zip":
        return {"train": zip_table(path)}
    if path.is_dir() and config is None and (tables := folder_tables(path)) is not None:
        return tables
    # `name` or `owner/name` may be a dataset on the hub.
    is_path = source[0] in "./~" or source.count("/") > 1 or path.suffix in FILES
    if is_path and "*" not in source and not path.exists():
        looked = f"looked for {os.path.abspath(path)}{neighbour_of(path)}"
        raise DataError(f"data.source: {source!r} was not found ({looked})")
    builder = open_builder(source, config)
    with quiet_library(source):
        builder.download_and_prepare()
        return {name: HubTable(split) for name, split in builder.as_dataset().items()}


def pick_split(tables: Mapping[str, Table], name: str, key: str) -> Table:
    """The split of this name, which must hold something; `key` is what errors put it down to."""
    if name not in tables:
        raise DataError(f"data.{key}: there is no split {name!r}{closest_of(name, tables)}")
    if not len(tables[name]):
        raise DataError(f"data.{key}: the split {name!r} is empty")
    return tables[name]


def source_hash(source: str, config: str | None = None) -> str:
    """What tells whether a source has changed, without reading it: names, sizes and times of its files.

    Of a dataset on the hub it is the version that the hub, or the cache of the `datasets` library, has now.
    """
    digest = hashlib.sha256()
    path = Path(source).expanduser()
    files: list[tuple[str, os.stat_result]] = []
    if path.is_dir():
        files = [(file.path[len(str(path)) :], file.stat()) for file in walk(path)]
    elif "*" in source or path.is_file():
        files = [(name, os.stat(name)) for name in sorted(glob.glob(str(path)))]
    elif source != DIGITS:
        digest.update(str(open_builder(source, config).cache_dir).encode())
    for name, status in files:
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def neighbour_of(path: Path) -> str:
    """The end of a message: the file or folder beside it with the closest name, if one is close."""
    folder = path.absolute().parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {os.path.join(path.parent, close[0])!r}?" if close else ""


def digits_table() -> ListTable:
    """scikit-learn's 1797 handwritten digits of 8×8, which come with the library; grey levels 0 … 16 become 0 … 255."""
    digits = import_extra("sklearn.datasets", f"the data {DIGITS!r}", "scikit-learn").load_digits()
    return ListTable({"image": (digits.images * (255 / 16)).round().astype("uint8"), "label": digits.target.tolist()})


class ZipMember(NamedTuple):
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
    names, start = sorted(file.path for file in walk(folder)), len(str(folder)) + 1
    if any(path.suffix in FILES or path.name in METADATA for path in map(PurePath, names)):
        return None
    names = [name for name in names if is_image(name[start:])]
    if not names:
        return None
    splits = split_names([name[start:] for name in names])
    # One list for all, because a class has the same number in every split.
    kept = sorted({row for rows in splits.values() for row in rows})
    labels = labels_of([names[row] for row in kept])
    label_of = {} if labels is None else dict(zip(kept, labels, strict=True))
    tables: dict[str, Table] = {}
    for split, rows in splits.items():
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


def split_names(names: Sequence[str]) -> dict[str, list[int]]:
    """The positions of names by the split that their folders tell, else the files themselves; `train` if neither does.

    >>> split_names(["train/cat/0.png", "test/cat/1.png", "more/2.png"])
    {'train': [0], 'test': [1]}
    """
    for part in (slice(None, -1), slice(-1, None)):
        splits: dict[str, list[int]] = {split: [] for split in SPLITS}
        for position, name in enumerate(names):
            words = PurePath(name).parts[part]
            for split, pattern in SPLITS.items():
                if any(map(pattern.search, words)):
                    splits[split].append(position)
        if any(splits.values()):
            return {split: rows for split, rows in splits.items() if rows}
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


def open_builder(source: str, config: str | None) -> Any:
    """What the library knows of files, of a folder or of a dataset on the hub before it reads them."""
    path = Path(source).expanduser()
    if "*" in source and not glob.glob(str(path)):
        raise DataError(f"data.source: there are no files {source!r} (looked for {os.path.abspath(path)})")
    with quiet_library(source) as datasets:
        if "*" in source or path.is_file():
            kind = "webdataset" if path.suffix in TARS else "parquet"
            return datasets.load_dataset_builder(kind, data_files={"train": str(path)})
        name = str(path) if path.exists() else source
        try:
            return datasets.load_dataset_builder(name, name=config)
        except ValueError:
            check_config(datasets, name, config)
            raise


def check_config(datasets: Any, path: str, config: str | None) -> None:
    """Raise DataError if that is why a set cannot be opened: it has no such configuration, or one must be chosen."""
    try:
        names = datasets.get_dataset_config_names(path)
    except (datasets.exceptions.DatasetsError, OSError, ValueError):
        return
    if config is None and len(names) > 1:
        raise DataError(f"data.config: {path!r} has {len(names)} configurations: choose one of {', '.join(names)}")
    if config is not None and config not in names:
        raise DataError(f"data.config: {path!r} has no configuration {config!r}{closest_of(config, names)}")


@contextmanager
def quiet_library(source: str) -> Iterator[Any]:
    """The library without progress bars, its errors told as ours; what the user had chosen is restored."""
    datasets = import_extra("datasets", f"the data {source!r}")
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    except DataError:
        raise
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(f"data.source: {source!r} {reason_of(source, error)}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def reason_of(source: str, error: Exception) -> str:
    """Why a source cannot be opened, and what to do."""
    reason, instead = first_line(error), "or name a local folder or parquet file instead: --set data.source=PATH"
    if "*" in source or Path(source).expanduser().exists():
        kinds = "neither a parquet file, a tar or a zip nor a folder of parquet files, tars or images that can be read"
        return f"is {kinds}: {reason}"
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        return f"was not found: it is a path, and no name of the hub. Check it, {instead}"
    if isinstance(error, ConnectionError):
        where = "is neither a path here nor in the cache, and the Hugging Face hub could not be reached"
        return f"{where} ({reason}). Try again online, {instead}"
    return f"could not be loaded from the Hugging Face hub ({reason}). Check the name, {instead}"
