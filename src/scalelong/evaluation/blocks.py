"""Features in numbered files: those that are finished are verified and kept, and several processes share the rest.

The processes exchange nothing but files, so none waits in a collective that could time out. What a block holds depends
on its number alone; neither kills nor the number of processes can be seen in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..data import Progress
from ..data.prepare import WHOLE, Share
from ..data.prepared_folder import Index, PreparedFolder
from ..training.files import read_tensors
from .statistics import Facts

# A multiple of what is drawn at once, so that no image is drawn in another batch than it would be alone.
BLOCK = 256
POLL_SECONDS = 0.2

# The features of the images from start to stop. Shape: (B, D); images that cannot be read may be missing.
Make = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Blocks:
    """The features of `count` images, in a folder that belongs to the facts they depend on."""

    folder: Path
    facts: Facts
    count: int
    make: Make
    progress: Progress | None = None

    def names(self) -> list[str]:
        """The last one's says how many images it has, so that more images later make another of it."""
        whole, rest = divmod(self.count, BLOCK)
        names = [f"block-{number:05d}" for number in range(whole)]
        return [*names, f"block-{whole:05d}-{rest}"] if rest else names

    def compute(self, share: Share = WHOLE) -> Tensor | None:
        """Compute what is missing; the first process waits for the others and returns all. Shape: (N, D), float32."""
        own = range(share.rank, len(self.names()), share.world)
        if share.rank and not own:
            return None  # The folder may be gone by now.
        store = PreparedFolder(self.folder)
        index = store.begin(self.facts)
        for number in own:
            self._report(store, index)
            if store.verified(self.names()[number], index) is None:
                self._add(store, number)
        if share.rank:
            return None
        while len(self._finished(store, index)) < len(self.names()):
            self._report(store, index)
            time.sleep(POLL_SECONDS)
        return self._gather(store)

    def _add(self, store: PreparedFolder, number: int) -> None:
        features = self.make(number * BLOCK, min((number + 1) * BLOCK, self.count))
        store.add(self.names()[number], {"features": features.float()}, rows=len(features), broken={})

    def _gather(self, store: PreparedFolder) -> Tensor:
        """All blocks in order; one that was damaged meanwhile is made again."""
        index = store.begin(self.facts)
        for number, name in enumerate(self.names()):
            if store.verified(name, index) is None:
                self._add(store, number)
        entries = {name: entry for name in self.names() if (entry := store.entry(name, index)) is not None}
        # An evaluation of fewer images does not forget those of a larger one.
        store.finish(self.facts, {**(index.entries or {}), **entries})
        if self.progress is not None:
            self.progress(self.count, self.count)
        return torch.cat([read_tensors(store.shard(name))["features"] for name in self.names()])

    def _finished(self, store: PreparedFolder, index: Index) -> set[str]:
        return set(self.names()) & (store.finished_names() | (index.entries or {}).keys())

    def _report(self, store: PreparedFolder, index: Index) -> None:
        if self.progress is not None:
            self.progress(min(len(self._finished(store, index)) * BLOCK, self.count), self.count)
