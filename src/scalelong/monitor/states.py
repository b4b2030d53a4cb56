"""The state of a run: steady, growing or failing. It comes and goes, and says which block it is.

A block *grows* when the norm of its features is so many times what it was at the first reading that no run which
learned well has reached it: `benchmarks/states.py` measures how good that rule is. A run *fails* when features are not
finite, or when the loss is on its way to that of a network that predicts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from ..guard.losses import WINDOW, LossWatch

State = Literal["steady", "growing", "failing"]

LIMIT = 500.0
"""A block grows from so many times its first features on, until it is below half of that."""


@dataclass(frozen=True)
class Status:
    """The state at the last reading; `str` says it in one sentence."""

    state: State = "steady"
    since: int = 0
    """The step from which on it is in this state."""
    block: str = ""
    """The first of the forward pass that has grown or is not finite; of a steady run the one that has grown most."""
    growth: float = 1.0
    """Its features over those of the first reading."""
    update: float | None = None
    """By which share of their norm its weights moved in the last step that was read."""
    trouble: str = ""
    """How far the loss has come from its best to that of predicting nothing, in words."""

    def __str__(self) -> str:
        since = f"{self.state} since step {self.since}"
        ratio = "" if self.update is None else f", and whose weights move by {self.update:.2%} a step"
        size = f"whose features are × {self.growth:.3g} of the first ones{ratio}"
        if self.state == "growing":
            return f"{since}, first in {self.block}, {size}"
        if self.state == "failing" and not math.isfinite(self.growth):
            return f"{since}: the features of {self.block} are not finite"
        grown = f", most of all in {self.block}, {size}" if self.block else ""
        return f"{since}: {self.trouble}{grown}" if self.state == "failing" else f"{since}{grown}"


class StateWatch:
    """Looks at one reading after the other, and at every loss that it is told."""

    def __init__(self, nothing: float | None = None) -> None:
        self.first: dict[str, float] = {}
        """The features of each block at the first reading."""
        self.losses: list[float] = []
        """Of the window that is not full yet."""
        self.watch = LossWatch(nothing)
        self.status = Status()

    def add_loss(self, loss: float) -> None:
        self.losses.append(loss)
        if len(self.losses) == WINDOW:
            self.watch.look(self.losses)
            self.losses = []

    def update(self, step: int, numbers: Mapping[str, float], order: Sequence[str]) -> None:
        """Look at a reading; `order` are the blocks as the forward pass runs them."""
        sizes = {name: numbers.get(f"block/{name}/feature", math.nan) for name in order}
        if not self.first and all(map(math.isfinite, sizes.values())):
            # What begins at zero, as last layers do, may grow to the size of the others.
            usual = median(sizes.values()) / 10
            self.first = {name: max(size, usual) or 1.0 for name, size in sizes.items()}
        growths = {name: size / self.first.get(name, 1.0) for name, size in sizes.items()}
        state, block = self._judge(growths)
        since = self.status.since if state == self.status.state else step
        self.status = Status(
            state,
            since,
            block,
            growths.get(block, 1.0),
            numbers.get(f"block/{block}/update"),
            self._loss() if self.watch.state != "healthy" else "",
        )

    def _judge(self, growths: Mapping[str, float]) -> tuple[State, str]:
        """The state, and the block that shows it."""
        if broken := [name for name, growth in growths.items() if not math.isfinite(growth)]:
            return "failing", broken[0]
        limit = LIMIT / 2 if self.status.state == "growing" else LIMIT
        grown = [name for name, growth in growths.items() if growth >= limit]
        if self.watch.state != "healthy":
            return "failing", grown[0] if grown else ""
        if grown:
            return "growing", grown[0]
        return "steady", max(growths, key=growths.__getitem__, default="")

    def _loss(self) -> str:
        watch = self.watch
        if watch.best is None or watch.nothing is None or watch.best >= watch.nothing:
            return f"the loss is {watch.mean:.4g}"
        come = (watch.mean - watch.best) / (watch.nothing - watch.best)
        return (
            f"the loss is {watch.mean:.4g}, {come:.0%} of the way from its best, {watch.best:.4g}, "
            f"to {watch.nothing:.4g}, that of predicting nothing"
        )

    def state_dict(self) -> dict[str, Any]:
        numbers = {"first": self.first, "losses": self.losses, "status": asdict(self.status)}
        return {**numbers, "watch": {**self.watch.state_dict(), "mean": self.watch.mean}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first, self.losses = dict(state["first"]), list(state["losses"])
        self.status = Status(**state["status"])
        vars(self.watch).update(state["watch"])
