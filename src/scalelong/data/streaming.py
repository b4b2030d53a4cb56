"""Batches of a stream: read, shuffled and decoded while the network trains, and resumed exactly."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .broken import BrokenImages
from .decoding import decode, ordered_map
from .examples import Picked, caption_of
from .loader import Batch, BatchDraws, make_batch
from .prefetch import Prefetch
from .streams import Cursor, ImageStream, Place, Row, ShuffledRows

# Batches that are made before they are asked for.
AHEAD = 4
# Rows of an endless stream that tell which share of it is broken.
ENOUGH = 1000


@dataclass(frozen=True)
class Made:
    """A batch that was made ahead, and where the stream goes on after it."""

    picked: Picked
    cursor: Cursor


class StreamBatches:
    """The batches of one process of a stream; `at` takes one step after another, from 0 or from where it is resumed.

    Reading, shuffling and decoding run ahead in threads, which end with `close`. The global batch of a step is made up
    of the processes' own rows, so that it depends on how many there are.
    """

    def __init__(
        self,
        stream: ImageStream,
        draws: BatchDraws,
        *,
        flip: bool = False,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.draws, self.flip, self.rank, self.world = draws, flip, rank, world
        self.own = draws.slice_of(rank, world)
        self.device = torch.device(device)
        self._maker = BatchMaker(ShuffledRows(stream, draws.seed, rank, world), draws, self.own)
        self._step, self._cursor = 0, Cursor()
        self._ahead: Prefetch[Made] | None = None

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.at(self._step)

    def at(self, step: int) -> Batch:
        """The batch of the next step."""
        if step != self._step:
            raise ValueError(f"a stream gives one batch after another: the next is {self._step}, not {step}")
        if self._ahead is None:
            self._ahead = Prefetch(partial(self._maker.make, step, self._cursor), AHEAD)
        made = next(self._ahead, None)
        if made is None:
            raise ValueError("the stream was closed while a batch was waited for")
        self._step, self._cursor = step + 1, made.cursor
        flips = self.draws.flips(step)[self.own] if self.flip else None
        return make_batch(step, made.picked, flips=flips, device=self.device)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins; small, and of this process only."""
        return {"step": self._step, "world": self.world, "rank": self.rank, **asdict(self._cursor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the stream that the state is of would have."""
        if not state:
            raise ValueError("this is not the state of a stream: the run was begun without data.streaming")
        share, own = (state["rank"], state["world"]), (self.rank, self.world)
        if share != own:
            raise ValueError(
                f"the stream of process {share[0]} of {share[1]} cannot be resumed by process {own[0]} of {own[1]}: "
                "a streaming run goes on with as many processes as it was begun with"
            )
        self.close()
        self._step = state["step"]
        self._cursor = Cursor(Place(**state["start"]), state["block"], state["position"])

    def close(self) -> None:
        """End the threads, and name the images that were skipped; another `at` begins them again."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._maker.report()


@dataclass
class BatchMaker:
    """What runs in the thread: rows decoded and put together; those that cannot be read are left out and counted."""

    rows: ShuffledRows
    draws: BatchDraws
    own: slice
    seen: int = 0
    broken: BrokenImages = field(init=False)

    def __post_init__(self) -> None:
        self.broken = BrokenImages(self.rows.stream.config.source)

    def make(self, step: int, cursor: Cursor, stop: threading.Event) -> Iterator[Made]:
        """The batches from a step and a cursor on."""
        examples = self._decode(cursor, stop)
        try:
            while True:
                seeds = self.draws.seeds(step)[self.own].tolist()
                parts = list(islice(examples, len(seeds)))
                if stop.is_set():
                    return
                yield Made(pick([(row, pixels) for _, row, pixels in parts], seeds), parts[-1][0])
                step += 1
        finally:
            examples.close()

    def report(self) -> None:
        """Name the images that were skipped."""
        self.broken.report(self.seen)

    def _decode(self, cursor: Cursor, stop: threading.Event) -> Generator[tuple[Cursor, Row, Tensor], None, None]:
        """The rows from a cursor on that can be read, with the cursor after each."""
        config, rows = self.rows.stream.config, self.rows.after(cursor, stop)
        work = ordered_map(lambda pair: (*pair, decode(pair[1].name, pair[1].picture, config)), rows, config.workers)
        before = cursor
        try:
            for after, row, pixels in work:
                if after.block != before.block:
                    self._end_block(epoch_ended=after.start.epoch != before.start.epoch)
                before, self.seen = after, self.seen + 1
                if isinstance(pixels, str):
                    self.broken.add(row.name, pixels)
                else:
                    yield after, row, pixels
        finally:
            work.close()
            rows.close()

    def _end_block(self, *, epoch_ended: bool) -> None:
        """Stop if too many images are broken, and name them after each epoch."""
        if epoch_ended or self.seen >= ENOUGH:
            self.broken.check(self.seen)
        if epoch_ended:
            self.report()


def pick(rows: list[tuple[Row, Tensor]], seeds: list[int]) -> Picked:
    """Decoded rows as a part of a batch, with one caption drawn for each."""
    labels = [row.label for row, _ in rows if row.label is not None]
    captions = tuple(
        row.captions[caption_of(seed, len(row.captions))]
        for (row, _), seed in zip(rows, seeds, strict=True)
        if row.captions is not None
    )
    images = torch.stack([pixels for _, pixels in rows])
    return Picked(images, torch.tensor(labels) if labels else None, captions=captions or None)
