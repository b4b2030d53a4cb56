"""Splits that are read from front to back, one shard after another: each file of a dataset is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from .errors import DataError
from .tables import Raw, Table, undecoded


class Shards(Protocol):
    """One split of a dataset as numbered shards, whose rows can be read from any one on."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int:
        """The number of shards."""
        ...

    def kind(self, column: str) -> str: ...

    def narrow(self, image: str, others: Sequence[str]) -> Shards: ...

    def read(self, shard: int, start: int = 0) -> Iterator[Raw]: ...

    def name(self, shard: int, row: int) -> str:
        """How messages call a row."""
        ...

    def values(self, columns: Sequence[str]) -> Iterator[tuple[list[str], dict[str, list[Any]]]]:
        """Columns with the names of their rows, many rows at a time, of all rows that need not be read whole for it."""
        ...


class TableShards:
    """A table as shards of one row each: shuffling the shards then shuffles the rows."""

    def __init__(self, table: Table) -> None:
        self.table = table

    @property
    def columns(self) -> Sequence[str]:
        return self.table.columns

    def __len__(self) -> int:
        return len(self.table)

    def kind(self, column: str) -> str:
        return self.table.kind(column)

    def narrow(self, image: str, others: Sequence[str]) -> TableShards:
        return TableShards(self.table.narrow(image, others))

    def read(self, shard: int, start: int = 0) -> Iterator[Raw]:
        if start == 0:
            yield self.table.row(shard)

    def name(self, shard: int, row: int) -> str:
        return f"row {shard}"

    def values(self, columns: Sequence[str]) -> Iterator[tuple[list[str], dict[str, list[Any]]]]:
        rows = range(len(self))
        yield [self.name(row, 0) for row in rows], {name: self.table.values(name, rows) for name in columns}


class HubShards:
    """A split as the `datasets` library streams it: the files of a local or remote dataset.

    `parquet` are the paths of the files, if they are local ones that can be read by column.
    """

    def __init__(self, dataset: Any, parquet: Sequence[str] = ()) -> None:
        if dataset.features is None:
            raise DataError(
                "data.streaming: the columns of this source are only known once it is read: set it to false"
            )
        self._dataset, self._parquet = dataset, parquet
        self.columns: Sequence[str] = list(dataset.features)

    def __len__(self) -> int:
        return self._dataset.num_shards

    def kind(self, column: str) -> str:
        return str(self._dataset.features[column])

    def narrow(self, image: str, others: Sequence[str]) -> HubShards:
        return HubShards(undecoded(self._dataset, image, others), self._parquet)

    def read(self, shard: int, start: int = 0) -> Iterator[Raw]:
        alone = self._dataset.shard(num_shards=len(self), index=shard)
        return iter(alone.skip(start) if start else alone)

    def name(self, shard: int, row: int) -> str:
        return f"row {row} of file {shard}"

    def values(self, columns: Sequence[str]) -> Iterator[tuple[list[str], dict[str, list[Any]]]]:
        from pyarrow.parquet import read_table

        for shard, file in enumerate(self._parquet):
            found = read_table(file, columns=list(columns))
            yield [self.name(shard, row) for row in range(len(found))], found.to_pydict()
