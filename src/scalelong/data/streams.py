"""The order of a stream: shards shuffled for each epoch and dealt to the processes, rows shuffled within blocks.

The `datasets` library has a shuffle buffer too, but drops what is in it when a stream is resumed. Here a block of rows
is read, shuffled by its number and used up, so that a stream resumes exactly from where its block began and how much of
it was used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from ..utils.rng import keyed_generator
from .columns import Captions, Sides, read_sides
from .config import DataConfig
from .decoding import row_name
from .errors import DataError
from .shards import Shards
from .tables import Raw


@dataclass(frozen=True)
class Place:
    """A row of the stream: of the shard whose turn it is in an epoch."""

    epoch: int = 0
    turn: int = 0
    row: int = 0


@dataclass(frozen=True)
class Cursor:
    """Where a stream goes on: after `position` rows of the shuffled block with this number, which begins at `start`."""

    start: Place = Place()
    block: int = 0
    position: int = 0


@dataclass(frozen=True)
class Row:
    """A picture that is not decoded yet, with what its row says about it."""

    name: str
    picture: Any
    label: int | None = None
    captions: Captions | None = None


@dataclass(frozen=True)
class ImageStream:
    """The training rows of a source; `held` says how many rows at the start of a shard are held out."""

    shards: Shards
    config: DataConfig
    classes: int | None = None
    held: Mapping[int, int] = field(default_factory=dict)

    def read(self, raws: list[tuple[str, Raw]]) -> list[Row]:
        """Named rows with their labels and captions, which are checked."""
        column = self.config.image_column
        names = [row_name(name, raw[column]) for name, raw in raws]
        sides = self.sides(names, [raw for _, raw in raws])
        labels = [None] * len(names) if sides.labels is None else sides.labels.tolist()
        captions = [None] * len(names) if sides.captions is None else sides.captions
        pictures = [raw[column] for _, raw in raws]
        return [Row(*parts) for parts in zip(names, pictures, labels, captions, strict=True)]

    def sides(self, names: Sequence[str], raws: Sequence[Raw]) -> Sides:
        values = lambda column: [raw[column] for raw in raws]  # noqa: E731
        return read_sides(self.shards, self.config, self.classes, names, values)


@dataclass(frozen=True)
class ShuffledRows:
    """One process's rows of a stream, in an order that is a function of seed, rank and world."""

    stream: ImageStream
    seed: int
    rank: int = 0
    world: int = 1

    def after(self, cursor: Cursor, stop: threading.Event) -> Generator[tuple[Cursor, Row], None, None]:
        """The endless rows from a cursor on, each with the cursor behind it, until told to stop.

        The next block is read while one is used.
        """
        closed, position = threading.Event(), cursor.position
        blocks = self._blocks(cursor, lambda: stop.is_set() or closed.is_set())
        reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        try:
            ahead = reader.submit(next, blocks, None)
            while (block := ahead.result()) is not None:
                ahead = reader.submit(next, blocks, None)
                begin, rows = block
                for index in self._permutation(begin.block, len(rows))[position:]:
                    position += 1
                    yield Cursor(begin.start, begin.block, position), rows[index]
                position = 0
        finally:
            closed.set()
            reader.shutdown(cancel_futures=True)

    def _blocks(self, cursor: Cursor, stopped: Callable[[], bool]) -> Iterator[tuple[Cursor, list[Row]]]:
        """Blocks of an epoch, then those of the next; the last one of an epoch is smaller."""
        place, number = cursor.start, cursor.block
        while True:
            rows, first = self._epoch(place, stopped), number
            while (block := list(islice(rows, self.stream.config.shuffle_buffer))) and not stopped():
                yield Cursor(block[0][0], number), self.stream.read([(name, raw) for _, name, raw in block])
                number += 1
            if stopped():
                return
            if number == first:
                raise DataError(f"data.source: there are no rows for process {self.rank} of {self.world}")
            place = Place(place.epoch + 1)

    def _epoch(self, place: Place, stopped: Callable[[], bool]) -> Iterator[tuple[Place, str, Raw]]:
        """The rows of an epoch that are this process's own, from a place on, unshuffled."""
        shards = self.stream.shards
        generator = keyed_generator(self.seed, "shards", place.epoch)
        order = torch.randperm(len(shards), generator=generator).tolist()
        # Whole shards are dealt out; those that are left over are shared by all, row by row.
        dealt = len(order) // self.world * self.world
        for turn, shard in enumerate(order[place.turn :], place.turn):
            if turn < dealt and turn % self.world != self.rank:
                continue
            first = max(place.row if turn == place.turn else 0, self.stream.held.get(shard, 0))
            for row, raw in enumerate(shards.read(shard, first), first):
                if stopped():
                    return
                if turn < dealt or row % self.world == self.rank:
                    yield Place(place.epoch, turn, row), shards.name(shard, row), raw

    def _permutation(self, block: int, size: int) -> list[int]:
        return torch.randperm(size, generator=keyed_generator(self.seed, f"block/{self.rank}", block)).tolist()
