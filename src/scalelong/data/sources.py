"""Where pictures come from: scikit-learn's digits, the Hugging Face hub, parquet, tars, zips and image folders."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import DataError, closest_of, first_line, missing_extra
from .tables import DIGITS, FILES, TARS, HubTable, Table, digits_table, folder_tables, walk, zip_table


def open_tables(source: str, config: str | None = None) -> dict[str, Table]:
    """The splits of a source by name, with random access; see DataConfig for what a source and its config may be."""
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
    if looks_like_path(source) and "*" not in source and not path.exists():
        raise DataError(
            f"data.source: {source!r} was not found (looked for {os.path.abspath(path)}{neighbour_of(path)})"
        )
    return load_splits(source, config)


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
    if path.is_dir():
        for file in walk(path):
            status = file.stat()
            digest.update(f"{file.path[len(str(path)) :]} {status.st_size} {status.st_mtime_ns}\n".encode())
    elif "*" in source or path.is_file():
        for name in sorted(glob.glob(str(path))):
            status = os.stat(name)
            digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    elif source != DIGITS:
        digest.update(str(open_builder(source, config).cache_dir).encode())
    return digest.hexdigest()[:32]


def looks_like_path(source: str) -> bool:
    """Whether it cannot be the name of a dataset on the hub: `name` or `owner/name`."""
    return source[0] in "./~" or source.count("/") > 1 or Path(source).suffix in FILES


def neighbour_of(path: Path) -> str:
    """The end of a message: the file or folder beside it with the closest name, if one is close."""
    folder = path.absolute().parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {os.path.join(path.parent, close[0])!r}?" if close else ""


def load_splits(source: str, config: str | None) -> dict[str, Table]:
    """The splits with random access, from the library's cache on the disk."""
    builder = open_builder(source, config)
    with quiet_library(source):
        builder.download_and_prepare()
        return {name: HubTable(split) for name, split in builder.as_dataset().items()}


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
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise missing_extra(source, "datasets") from error
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    except DataError:
        raise
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(f"data.source: {source!r} {reason_of(source, error)}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def reason_of(source: str, error: Exception) -> str:
    """Why a source cannot be opened, and what to do."""
    if "*" in source or Path(source).expanduser().exists():
        return (
            "is neither a parquet file, a tar or a zip nor a folder of parquet files, tars or images that can be read: "
            f"{first_line(error)}"
        )
    instead = "or name a local folder or parquet file instead: --set data.source=PATH"
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        return f"was not found: it is a path, and no name of the hub. Check it, {instead}"
    if isinstance(error, ConnectionError):
        return (
            "is neither a path here nor in the cache, and the Hugging Face hub could not be reached "
            f"({first_line(error)}). Try again online, {instead}"
        )
    return f"could not be loaded from the Hugging Face hub ({first_line(error)}). Check the name, {instead}"
