"""Which of several processes this is."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """One process of `world`: its part of some work is what has the number `index` modulo `world`."""

    index: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> Rank:
        """That of this process, as torchrun and accelerate say it."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


SINGLE = Rank()
