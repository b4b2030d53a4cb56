"""Where pictures come from: scikit-learn's digits, the Hugging Face hub, parquet files and image folders."""

from __future__ import annotations

import difflib
import io
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

logger = logging.getLogger(__name__)

DIGITS = "sklearn:digits"


class DataError(ValueError):
    """The data is not there, or not as the recipe says."""


class Table(Protocol):
    """One split of a dataset: rows with a picture and perhaps a label."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def pictures(self, column: str, rows: Sequence[int]) -> Iterator[Picture]: ...

    def labels(self, column: str, rows: Sequence[int]) -> Tensor: ...


def open_tables(source: str) -> dict[str, Table]:
    """The splits of a source by name; see DataConfig.source for what a source may be."""
    if source == DIGITS:
        return {"train": DigitsTable()}
    if source.startswith("sklearn:"):
        raise DataError(f"data.source: {source!r} is not known; of scikit-learn's datasets only {DIGITS!r} is")
    path = Path(source).expanduser()
    if path.exists():
        return open_path(path)
    if looks_like_path(source):
        raise DataError(f"data.source: {source!r} was not found (looked for {os.path.abspath(path)})")
    return open_hub(source)


def looks_like_path(source: str) -> bool:
    """Whether it cannot be the name of a dataset on the hub: `name` or `owner/name`."""
    return source[0] in "./~" or source.count("/") > 1 or Path(source).suffix in {".parquet", ".zip"}


class DigitsTable:
    """scikit-learn's 1797 handwritten digits of 8×8, which come with the library; grey levels 0 … 16 become 0 … 255."""

    columns = ("image", "label")

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise missing_extra(DIGITS, "scikit-learn") from error
        digits: Any = load_digits()
        self._images = (digits.images * (255 / 16)).round().astype("uint8")
        self._labels = torch.as_tensor(digits.target, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._images)

    def pictures(self, column: str, rows: Sequence[int]) -> Iterator[Picture]:
        from PIL import Image

        return (Image.fromarray(self._images[row]) for row in rows)

    def labels(self, column: str, rows: Sequence[int]) -> Tensor:
        return self._labels[torch.as_tensor(rows)]


class HubTable:
    """A split as the `datasets` library holds it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.columns: Sequence[str] = dataset.column_names

    def __len__(self) -> int:
        return len(self._dataset)

    def pictures(self, column: str, rows: Sequence[int]) -> Iterator[Picture]:
        from datasets import Image

        try:
            # Not decoded by the library: a picture that cannot be opened must be named by its row.
            encoded = self._dataset.select_columns(column).cast_column(column, Image(decode=False))
        except (TypeError, ValueError, NotImplementedError) as error:
            kind = self._dataset.features[column]
            raise DataError(f"data.image_column: the column {column!r} holds {kind}, not images") from error
        batches = encoded.select(rows).iter(batch_size=256)
        return (open_picture(item) for batch in batches for item in batch[column])

    def labels(self, column: str, rows: Sequence[int]) -> Tensor:
        values = list(self._dataset.select_columns(column).select(rows)[column])
        if not all(isinstance(value, int) for value in values):
            kind = self._dataset.features[column]
            raise DataError(f"data.label_column: the column {column!r} holds {kind}, not whole numbers")
        return torch.tensor(values, dtype=torch.int64)


def open_picture(encoded: dict[str, Any] | None) -> Picture:
    """A picture from its bytes, or from the file they are in."""
    from PIL import Image

    if encoded is None or (encoded["bytes"] is None and encoded["path"] is None):
        raise ValueError("the row has no picture")
    return Image.open(encoded["path"] if encoded["bytes"] is None else io.BytesIO(encoded["bytes"]))


def open_path(path: Path) -> dict[str, Table]:
    """The splits of a parquet file (all of it is `train`) or of a folder, told apart by the names in it."""
    where = {"path": str(path)} if path.is_dir() else {"path": "parquet", "data_files": {"train": str(path)}}
    datasets = import_datasets(str(path))
    try:
        return load_tables(datasets, **where)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"data.source: {str(path)!r} is neither a parquet file nor a folder of parquet files or images "
            f"that can be read: {first_line(error)}"
        ) from error


def open_hub(name: str) -> dict[str, Table]:
    datasets = import_datasets(name)
    instead = "or name a local folder or parquet file instead: --set data.source=PATH"
    try:
        return load_tables(datasets, path=name)
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


def load_tables(datasets: Any, **where: Any) -> dict[str, Table]:
    with no_progress_bars(datasets):
        splits = datasets.load_dataset(**where)
    logger.info("opened %s: %s", where, {name: len(split) for name, split in splits.items()})
    return {name: HubTable(split) for name, split in splits.items()}


def import_datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_extra(source, "datasets") from error
    return datasets


def missing_extra(source: str, library: str) -> ImportError:
    return ImportError(f"the data {source!r} needs {library}: pip install 'scalelong[train]'")


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


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def closest_of(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the closest name and the list of all."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} There are: {', '.join(names)}"
