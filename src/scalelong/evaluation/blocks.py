"""Features in numbered files: those that are finished are verified and kept, and several processes share the rest.

The processes exchange nothing but files, so none waits in a collective that could time out. What a block holds depends
on its number alone; at the same number of threads neither kills nor the number of processes can be seen in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..sampling.sample_folder import Progress
from ..utils.atomic import read_tensors
from ..utils.blocks import BlockFolder, Index
from ..utils.distributed import SINGLE, Rank
from .statistics import Facts

# A multiple of what is drawn at once, so that no image is drawn in another batch than it would be alone.
BLOCK = 256
POLL_SECONDS = 0.2

Make = Callable[[range, Callable[[float], None]], Tensor]
"""The features of the images of these numbers, telling what share is done. Shape: (B, D); broken ones are missing."""


@dataclass(frozen=True)
class Blocks:
    """The features of `count` images, in a folder that belongs to the facts they depend on."""

    folder: Path
    facts: Facts
    count: int
    make: Make
    progress: Progress = lambda done, count: None

    @property
    def ranges(self) -> list[range]:
        return [range(start, min(start + BLOCK, self.count)) for start in range(0, self.count, BLOCK)]

    @property
    def names(self) -> list[str]:
        """A short one's says how many images it has, so that more images later make another of it."""
        sizes = [len(block) for block in self.ranges]
        return [f"block-{number:05d}{'' if size == BLOCK else f'-{size}'}" for number, size in enumerate(sizes)]

    def compute(self, rank: Rank = SINGLE) -> Tensor | None:
        """All features, in the first process, which waits for the others; None in those. Shape: (N, D), float32."""
        return torch.cat(list(self.parts())) if self.fill(rank) else None

    def parts(self) -> Iterator[Tensor]:
        """The features of one block after another, once all are there. Shape: (B, D), float32."""
        store = BlockFolder(self.folder)
        return (read_tensors(store.shard(name))["features"] for name in self.names)

    def fill(self, rank: Rank = SINGLE) -> bool:
        """Compute what is missing of this process's share; the first one waits for the others, and says that all is."""
        own = range(rank.index, len(self.names), rank.world)
        if rank.index and not own:
            return False  # The folder may be gone by now.
        store = BlockFolder(self.folder)
        index = store.begin(self.facts)
        for number in own:
            # The first process may have finished meanwhile, and moved what it knows to the index.
            index = store.index() or index
            done = self._report(store, index)
            if store.verified(self.names[number], index) is None:
                self._add(store, number, done)
        if rank.index:
            return False
        while self._report(store, index) < self.count:
            time.sleep(POLL_SECONDS)
        self._finish(store)
        return True

    def _add(self, store: BlockFolder, number: int, done: int) -> None:
        block = self.ranges[number]
        features = self.make(block, lambda share: self.progress(min(done + share * len(block), self.count), self.count))
        store.add(self.names[number], {"features": features.float()}, rows=len(features), broken={})

    def _finish(self, store: BlockFolder) -> None:
        """Write the index; a block that was damaged meanwhile is made again."""
        index = store.begin(self.facts)
        for number, name in enumerate(self.names):
            if store.verified(name, index) is None:
                self._add(store, number, self.count)
        entries = {name: entry for name in self.names if (entry := store.entry(name, index)) is not None}
        # An evaluation of fewer images does not forget those of a larger one.
        store.finish(self.facts, {**(index.entries or {}), **entries})

    def _report(self, store: BlockFolder, index: Index) -> int:
        """How many images are in finished blocks, those of other processes included; told to whoever wants to know."""
        finished = store.finished_names() | (index.entries or {}).keys()
        pairs = zip(self.names, self.ranges, strict=True)
        done = sum(len(block) for name, block in pairs if name in finished)
        self.progress(done, self.count)
        return done
