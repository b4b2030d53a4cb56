"""Where pictures come from: scikit-learn's digits, the Hugging Face hub, parquet, tars, zips and image folders."""

from __future__ import annotations

import difflib
import glob
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from .errors import DataError, closest_of, first_line, missing_extra
from .shards import HubShards, Shards, TableShards
from .tables import DIGITS, HubTable, Table, digits_table, zip_table

logger = logging.getLogger(__name__)

TARS = {".tar", ".tgz", ".gz"}
FILES = {".parquet", ".zip", *TARS}

Split = TypeVar("Split")


def open_tables(source: str, config: str | None = None) -> dict[str, Table]:
    """The splits of a source by name, with random access; see DataConfig for what a source and its config may be."""
    in_memory = open_in_memory(source, config)
    if in_memory is not None:
        return {"train": in_memory}
    return {name: HubTable(split) for name, split in open_with_library(source, config, prepare).items()}


def open_shards(source: str, config: str | None = None) -> dict[str, Shards]:
    """The splits of a source by name, to be streamed; images in files or in a zip are shards of one row each."""
    in_memory = open_in_memory(source, config)
    if in_memory is not None:
        return {"train": TableShards(in_memory)}
    return open_with_library(source, config, stream)


def pick_split(splits: Mapping[str, Split], name: str, key: str) -> Split:
    if name not in splits:
        raise DataError(f"data.{key}: there is no split {name!r}{closest_of(name, splits)}")
    return splits[name]


def open_in_memory(source: str, config: str | None) -> Table | None:
    """What the `datasets` library is not needed for, or None."""
    if config is not None and (source == DIGITS or "*" in source or Path(source).expanduser().is_file()):
        raise DataError(f"data.config: {source!r} has no configurations to choose from; leave it out")
    if source == DIGITS:
        return digits_table()
    if source.startswith("sklearn:"):
        raise DataError(f"data.source: {source!r} is not known; of scikit-learn's datasets only {DIGITS!r} is")
    path = Path(source).expanduser()
    return zip_table(path) if path.is_file() and path.suffix == ".zip" else None


def open_with_library(source: str, config: str | None, use: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """The splits that `use` makes of the builder, which knows the files and their format."""
    path = Path(source).expanduser()
    if "*" in source or path.exists():
        return open_path(path, config, use)
    if looks_like_path(source):
        raise DataError(
            f"data.source: {source!r} was not found (looked for {os.path.abspath(path)}{neighbour_of(path)})"
        )
    return open_hub(source, config, use)


def looks_like_path(source: str) -> bool:
    """Whether it cannot be the name of a dataset on the hub: `name` or `owner/name`."""
    return source[0] in "./~" or source.count("/") > 1 or Path(source).suffix in FILES


def neighbour_of(path: Path) -> str:
    """The end of a message: the file or folder beside it with the closest name, if one is close."""
    folder = path.absolute().parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {os.path.join(path.parent, close[0])!r}?" if close else ""


def open_path(path: Path, config: str | None, use: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """The splits of files (all of them are `train`) or of a folder, told apart by the names in it."""
    datasets = import_datasets(str(path))
    if "*" in str(path) and not glob.glob(str(path)):
        raise DataError(f"data.source: there are no files {str(path)!r} (looked for {os.path.abspath(path)})")
    try:
        return open_splits(datasets, use, name=config, **files_of(path))
    except DataError:
        raise
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"data.source: {str(path)!r} is neither a parquet file, a tar or a zip nor a folder of parquet files, tars "
            f"or images that can be read: {first_line(error)}"
        ) from error


def files_of(path: Path) -> dict[str, Any]:
    """A path as the arguments by which the library finds its files."""
    if path.is_dir():
        return {"path": str(path)}
    return {"path": "webdataset" if path.suffix in TARS else "parquet", "data_files": {"train": str(path)}}


def open_hub(name: str, config: str | None, use: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    datasets = import_datasets(name)
    instead = "or name a local folder or parquet file instead: --set data.source=PATH"
    try:
        return open_splits(datasets, use, name=config, path=name)
    except DataError:
        raise
    except ConnectionError as error:
        raise DataError(
            f"data.source: {name!r} is neither a path here nor in the cache, and the Hugging Face hub could not be "
            f"reached ({first_line(error)}). Try again online, {instead}"
        ) from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"data.source: {name!r} could not be loaded from the Hugging Face hub ({first_line(error)}). "
            f"Check the name, {instead}"
        ) from error


def open_splits(datasets: Any, use: Callable[[Any], dict[str, Any]], **where: Any) -> dict[str, Any]:
    with no_progress_bars(datasets):
        try:
            builder = datasets.load_dataset_builder(**where)
        except ValueError:
            check_config(datasets, where["path"], where["name"])
            raise
        splits = use(builder)
    logger.info("opened %s: %s", where, ", ".join(splits))
    return splits


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


def prepare(builder: Any) -> dict[str, Any]:
    """The splits with random access, from the library's cache on the disk."""
    builder.download_and_prepare()
    return dict(builder.as_dataset())


def stream(builder: Any) -> dict[str, Shards]:
    """The splits as they are streamed; of a local folder of images only the paths, which can be shuffled as a whole."""
    if builder.name == "imagefolder" and builder.repo_id is None:
        return {name: TableShards(HubTable(split)) for name, split in prepare(builder).items()}
    is_local_parquet = builder.name == "parquet" and builder.repo_id is None
    files = {str(name): list(some) for name, some in builder.config.data_files.items()} if is_local_parquet else {}
    return {name: HubShards(split, files.get(name, ())) for name, split in builder.as_streaming_dataset().items()}


def import_datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_extra(source, "datasets") from error
    return datasets


@contextmanager
def no_progress_bars(datasets: Any) -> Iterator[None]:
    """A library does not print; what the user had chosen is restored."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
