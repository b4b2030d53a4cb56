"""How much series of numbers go back and forth (the paper's Fig. 1), and which block and skip began it.

A block oscillates when the norm of its features goes back and forth by a fifth of its size from one reading to the
next, beyond what the choice of the batches explains: `benchmarks/diagnosis.py` measures how good this rule is. What
oscillates moves all that comes after it, often more strongly, so the origin is the first block of the forward pass
that moves at least half as much as the limit by then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

Numbers = Mapping[str, float]

LIMIT = 0.2
"""A block whose features swing by more oscillates."""
ORIGIN = 0.5
"""The origin moves by at least so much of the limit."""
OF_NOISE = 2 / math.sqrt(math.pi)
"""The mean of |a − b| for two normal numbers of standard deviation 1."""


def oscillation_index(series: Tensor) -> Tensor:
    """Relative total variation per reading: the mean of |x_{k+1} − x_k| over the mean of |x_k|. Shape: (n, S) → (S,).

    0 for a constant, and 1 for a series that jumps between 1 and 3. A series of zeros has 0, one with a value that is
    missing or not finite has NaN.

    >>> oscillation_index(torch.tensor([[1.0, 1.0], [3.0, 2.0], [1.0, 3.0], [3.0, 4.0]])).tolist()
    [1.0, 0.4...]
    """
    return relative(series, series.diff(dim=0).abs().sum(dim=0))


def swing_index(series: Tensor) -> Tensor:
    """The part of the oscillation index that comes back: without the net change, so that growth counts nothing.

    >>> swing_index(torch.tensor([[1.0, 1.0], [3.0, 2.0], [1.0, 3.0], [3.0, 4.0]])).tolist()
    [0.66..., 0.0]
    """
    net = (series[-1] - series[0]).abs()
    return relative(series, series.diff(dim=0).abs().sum(dim=0) - net)


def beyond_noise(swings: Tensor, noise: Tensor) -> Tensor:
    """The part of the swings that the choice of the batches does not explain; `noise` is a relative standard error.

    Independent motions add in squares. Noise that is not known counts as none. Shape: (S,), (S,) → (S,).

    >>> beyond_noise(torch.tensor([0.3, 0.1]), torch.tensor([0.1, 0.1])).tolist()
    [0.27..., 0.0]
    """
    explained = OF_NOISE * noise.nan_to_num(0.0, posinf=0.0)
    return (swings.square() - explained.square()).clamp_min(0).sqrt()


def relative(series: Tensor, variation: Tensor) -> Tensor:
    """The variation of n readings, per step and over the mean size. Shape: (n, S), (S,) → (S,)."""
    if len(series) < 2:
        return torch.full_like(variation, torch.nan)
    size = series.abs().mean(dim=0) * (len(series) - 1)
    index = torch.where(size == 0, variation, variation / size)
    return index.where(series.isfinite().all(dim=0), torch.nan)


@dataclass(frozen=True)
class Diagnosis:
    """The block that oscillated first and the skip that moved most then; `str` says it in one sentence.

    `swing` is how far the norm of the block's features goes back and forth between two readings, over its mean; if
    features are not `finite` any more, how far it moved before that.
    """

    step: int
    block: str
    swing: float
    worst: str
    """The block that moved most, often further on."""
    worst_swing: float
    skip: int
    consumer: str
    skip_swing: float
    finite: bool = True

    def __str__(self) -> str:
        when = "on training oscillates" if self.finite else "on features are not finite"
        if not self.worst_swing:
            return f"from step {self.step} {when}, first in {self.block}, before there were readings enough to see why."
        how, most_how = ("swing", "swings") if self.finite else ("had moved", "had moved")
        further = f", up to {self.worst_swing:.0%} in {self.worst}" if self.worst != self.block else ""
        skips = "the long skips are calm" if self.skip_swing < ORIGIN * LIMIT else "of the long skips"
        return (
            f"from step {self.step} {when}, first in {self.block}, whose features {how} by {self.swing:.0%} of their "
            f"norm from one reading to the next{further}; {skips}, skip {self.skip} (into {self.consumer}) {most_how} "
            f"most, by {self.skip_swing:.0%}."
        )


class Finder:
    """Looks at one reading after the other, and keeps the first oscillation that it finds."""

    def __init__(self, consumers: Mapping[int, str]) -> None:
        self.consumers = consumers
        """Of each skip, outermost first."""
        self.found: Diagnosis | None = None
        self.before: dict[str, float] = {}
        """The oscillation of each series at the last reading: growth, too, leads to features that are not finite."""

    def update(
        self, step: int, numbers: Numbers, oscillation: Numbers, swings: Numbers, *, order: Sequence[str]
    ) -> None:
        """Look at a reading and the window that ends with it; `order` are the blocks as the forward pass runs them."""
        if self.found is not None or not order:
            return
        broken = [name for name in order if not math.isfinite(numbers.get(feature(name), math.nan))]
        if broken:
            # Where nothing had moved, or there are too few readings to tell, the first that broke is all there is.
            moved = any(self.before.get(feature(name)) for name in order)
            self.found = self._diagnose(step, self.before, order if moved else broken, finite=False)
        elif max(swings.get(feature(name), 0.0) for name in order) > LIMIT:
            self.found = self._diagnose(step, swings, order)
        self.before = dict(oscillation)

    def _diagnose(self, step: int, index: Numbers, order: Sequence[str], *, finite: bool = True) -> Diagnosis:
        blocks = {name: index.get(feature(name), 0.0) for name in order}
        # A skip moves by itself, or against the trunk; a share is one of squared norms, so it moves twice as much.
        alone = {number: index.get(f"skip{number}/feature", 0.0) for number in self.consumers}
        skips = {number: max(own, index.get(f"skip{number}/share", 0.0) / 2) for number, own in alone.items()}
        worst, skip = max(blocks, key=blocks.__getitem__), max(skips, key=skips.__getitem__)
        enough = ORIGIN * (LIMIT if finite else blocks[worst])
        origin = next(name for name in order if blocks[name] >= enough)
        swing, most, consumer = blocks[origin], blocks[worst], self.consumers[skip]
        return Diagnosis(step, origin, swing, worst, most, skip, consumer, skips[skip], finite)

    def state_dict(self) -> dict[str, Any]:
        return {"found": None if self.found is None else asdict(self.found), "before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.found = None if state["found"] is None else Diagnosis(**state["found"])
        self.before = dict(state["before"])


def feature(block: str) -> str:
    return f"block/{block}/feature"
