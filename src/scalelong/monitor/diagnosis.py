"""Which block and which long skip oscillated first, in one sentence.

A block oscillates when the norm of its features goes back and forth by a fifth of its size from one reading to the
next, beyond what the draw of the batches explains: `benchmarks/diagnosis.py` measures how good this rule is. What
oscillates shakes all that comes after it, often more strongly, so the origin is the first block of the forward pass
that moves at least half as much as the limit by then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .readings import Layout, Numbers

LIMIT = 0.2
TRACE = 0.5


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
        how = "swing" if self.finite else "had moved"
        further = f", up to {self.worst_swing:.0%} in {self.worst}" if self.worst != self.block else ""
        return (
            f"from step {self.step} {when}, first in {self.block}, whose features {how} by {self.swing:.0%} of their "
            f"norm from one reading to the next{further}; {self._about_skips(how)}."
        )

    def _about_skips(self, how: str) -> str:
        most = f"skip {self.skip} (into {self.consumer})"
        if self.skip_swing < TRACE * LIMIT:
            return f"the long skips are calm, {most} {how}{'s' if self.finite else ''} most, by {self.skip_swing:.0%}"
        return f"of the long skips, {most} {how}{'s' if self.finite else ''} most, by {self.skip_swing:.0%}"


class Finder:
    """Looks at one reading after the other, and keeps the first oscillation that it finds."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.found: Diagnosis | None = None
        self.before: dict[str, float] = {}

    def update(
        self, step: int, numbers: Numbers, *, oscillation: Numbers, swings: Numbers, order: Sequence[str]
    ) -> None:
        """Judge the window that ends with `numbers`; `order` are the blocks as the forward pass runs them."""
        if self.found is not None or not order:
            return
        broken = [name for name in order if not math.isfinite(numbers[feature(name)])]
        if broken:
            # Where nothing had moved, or there are too few readings to tell, the first that broke is all there is.
            seen = any(judged(self.before, feature(name)) for name in order)
            self.found = self._diagnose(step, self.before, order if seen else broken, finite=False)
        elif max(judged(swings, feature(name)) for name in order) > LIMIT:
            self.found = self._diagnose(step, swings, order)
        # The last numbers before features stop being finite; growth, too, leads there.
        self.before = dict(oscillation)

    def _diagnose(self, step: int, index: Numbers, order: Sequence[str], *, finite: bool = True) -> Diagnosis:
        blocks = {name: judged(index, feature(name)) for name in order}
        skips = {number: skip_index(number, index) for number, _ in self.layout.skips}
        worst, skip = max(blocks, key=blocks.__getitem__), max(skips, key=skips.__getitem__)
        enough = TRACE * (LIMIT if finite else blocks[worst])
        origin = next(name for name in order if blocks[name] >= enough)
        consumer = dict(self.layout.skips)[skip]
        return Diagnosis(step, origin, blocks[origin], worst, blocks[worst], skip, consumer, skips[skip], finite)

    def state_dict(self) -> dict[str, Any]:
        before = {name: value for name, value in self.before.items() if not math.isnan(value)}
        return {"found": None if self.found is None else asdict(self.found), "before": before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.found = None if state["found"] is None else Diagnosis(**state["found"])
        self.before = dict(state["before"])


def feature(block: str) -> str:
    return f"block/{block}/feature"


def judged(index: Numbers, series: str) -> float:
    """The index of a series; 0 as long as it cannot be judged."""
    value = index.get(series, 0.0)
    return 0.0 if math.isnan(value) else value


def skip_index(number: int, index: Numbers) -> float:
    """A skip moves by itself, or against the trunk; a share is one of squared norms, so it moves twice as much."""
    return max(judged(index, f"skip{number}/feature"), judged(index, f"skip{number}/share") / 2)
