"""What the losses of a run say: a step that must not reach the weights, a spike, a collapse.

Nothing here reads or writes files, restores anything or waits for a device: losses come in as plain numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

WINDOW = 20
"""Steps over which the loss is averaged before anything is said about a collapse."""

COLLAPSED, HEALTHY = 0.5, 0.25
"""How far a loss has come from its best to that of predicting nothing."""

CLEARLY, PATIENCE, BEGUN = 6.0, 10, 4.0
"""A rise of more than CLEARLY standard errors is believed at once; a smaller one if it lasts for PATIENCE windows, and
the best loss had been BEGUN standard errors below that of predicting nothing."""

FIRST = 5
"""Losses of an untrained network, whose mean stands for that of predicting nothing where nobody says it."""


class TrainingDiverged(RuntimeError):
    """Going back did not help, or was not asked for; the message says what to change."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"training diverged: {what}. Lower the learning rate or warm up longer, clip gradients, scale the long "
            "skips (scaling.method=cs with a smaller kappa), or train in float32"
        )


@dataclass(frozen=True)
class StepDecision:
    """What to do with a step's gradients: `ok` apply them, `skip` drop them, `rollback` drop them and go back.

    `overflow` drops them too, but only because the scaler of fp16 has to find its scale: nothing is wrong with the run.
    """

    action: Literal["ok", "skip", "rollback", "overflow"]
    loss: float
    grad_norm: float

    @property
    def ok(self) -> bool:
        return self.action == "ok"

    @property
    def is_nonfinite(self) -> bool:
        return self.action in ("skip", "rollback")


def check_finite(
    loss: float, grad_norm: float, *, skipped: int = 0, max_skipped: int = 0, scale: float = 1.0
) -> StepDecision:
    """Decide about a step by its loss and the norm of its gradients, which is non-finite if any of them is.

    `skipped` is how many steps in a row were skipped before this one: after `max_skipped` the next asks for a rollback.
    `scale` is what a scaler multiplied the loss by: above 1 it may be what made gradients of a finite loss overflow.

    >>> check_finite(0.5, 2.0).action, check_finite(math.nan, 1.0, max_skipped=1).action
    ('ok', 'skip')
    >>> check_finite(math.nan, 1.0, skipped=1, max_skipped=1).action, check_finite(0.5, math.inf, scale=2.0).action
    ('rollback', 'overflow')
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return StepDecision("ok", loss, grad_norm)
    if math.isfinite(loss) and scale > 1:
        return StepDecision("overflow", loss, grad_norm)
    return StepDecision("skip" if skipped < max_skipped else "rollback", loss, grad_norm)


@dataclass(frozen=True)
class Spike:
    """A loss far above those before it; `deviations` counts robust standard deviations of the log loss."""

    step: int
    loss: float
    typical: float
    deviations: float


class SpikeDetector:
    """Marks a loss that lies more than `threshold` robust deviations above the median of the last `window`, in logs.

    The deviation is 1.4826·MAD, which a few earlier spikes do not inflate, and at least 1 %. It decides from a
    half-full window on. A level that stays becomes the typical one, so that a jump to a plateau is marked while it is
    news.

    >>> detector = SpikeDetector(window=10)
    >>> [detector.update(step, 1.0) for step in range(10)][-1]
    >>> detector.update(10, 20.0).typical
    1.0
    """

    def __init__(self, window: int = 100, threshold: float = 6.0) -> None:
        if window < 4 or threshold <= 0:
            raise ValueError(f"a window of at least 4 and a threshold above 0 are needed, got {window=}, {threshold=}")
        self.window = window
        self.threshold = threshold
        self.logs: deque[float] = deque(maxlen=window)

    def update(self, step: int, loss: float) -> Spike | None:
        """Compare a loss with those before it, then remember it; one that is not finite is left out."""
        if not math.isfinite(loss):
            return None
        level = math.log(max(loss, 1e-30))
        spike = self._compare(step, loss, level) if 2 * len(self.logs) >= self.window else None
        self.logs.append(level)
        return spike

    def state_dict(self) -> dict[str, list[float]]:
        return {"logs": list(self.logs)}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        self.logs = deque(state["logs"], maxlen=self.window)

    def _compare(self, step: int, loss: float, level: float) -> Spike | None:
        middle = median(self.logs)
        spread = max(1.4826 * median(abs(log - middle) for log in self.logs), 0.01)
        deviations = (level - middle) / spread
        return Spike(step, loss, math.exp(middle), deviations) if deviations > self.threshold else None


State = Literal["healthy", "rising", "collapsed"]


class LossWatch:
    """Tells from the losses of one window after the other whether a run is collapsing to predicting nothing.

    A run has collapsed if its mean loss is more than half of the way from the best one to that of predicting nothing,
    `nothing`; where the best is not below that, if it is half as much again. A network that has hardly begun to learn
    is near `nothing` anyway, so that a rise has to be clear beside the noise of the losses, or to last.

    >>> watch = LossWatch(nothing=1.0)
    >>> watch.look([0.2, 0.21] * 10), watch.look([0.2, 0.4] * 10), watch.look([0.7, 0.9] * 10)
    ('healthy', 'healthy', 'collapsed')
    """

    def __init__(self, nothing: float | None = None) -> None:
        self.nothing = nothing
        self.mean: float = math.nan
        """Of the last window."""
        self.level: float | None = None
        """Of the healthy windows, the latest weighing half; a single window may be low by luck."""
        self.best: float | None = None
        """The lowest level up to now."""
        self.noise = 0.0
        """The standard error of a healthy window's mean."""
        self.above = 0
        """Windows in a row that were over the line."""
        self.state: State = "healthy"

    def look(self, losses: Sequence[float]) -> State:
        """Judge a window of losses and remember it."""
        if self.nothing is None and all(map(math.isfinite, losses)):
            self.nothing = fmean(losses[:FIRST])
        self.mean = fmean(losses)
        noise = standard_error(losses)
        if math.isfinite(self.mean) and self.best is None:
            self.best, self.level, self.noise = self.mean, self.mean, noise
        self.state = "collapsed" if self.best is None or not math.isfinite(self.mean) else self._judge(self.best, noise)
        return self.state

    def is_calm(self, losses: Sequence[float]) -> bool:
        """Whether the last window was healthy, and the losses since then are, too."""
        if self.state != "healthy" or not losses or self.best is None:
            return self.state == "healthy"
        mean = fmean(losses)
        return mean <= self.line(HEALTHY) or mean - self.best <= CLEARLY * self.noise

    def line(self, share: float) -> float:
        """The loss that lies so far on the way from the best to that of predicting nothing."""
        assert self.nothing is not None and self.best is not None, "there was a window"
        gap = self.nothing - self.best
        return self.best + share * (gap if gap > 0 else self.best)

    def _judge(self, best: float, noise: float) -> State:
        assert self.nothing is not None and self.level is not None, "they were set with the first window"
        self.above = self.above + 1 if self.mean > self.line(COLLAPSED) else 0
        clear = self.mean - best > CLEARLY * self.noise
        lasting = self.above >= PATIENCE and self.nothing - best > BEGUN * self.noise
        if self.above and (clear or lasting):
            return "collapsed"
        if self.above or (clear and self.mean > self.line(HEALTHY)):
            return "rising"
        self.level = (self.level + self.mean) / 2
        self.best = min(best, self.level)
        self.noise += (noise - self.noise) / PATIENCE
        return "healthy"

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "mean"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


def standard_error(losses: Sequence[float]) -> float:
    """That of their mean, from the differences of neighbours, so that a trend counts nothing.

    >>> round(standard_error([1.0, 1.2] * 10), 3)
    0.032
    """
    differences = [(later - earlier) ** 2 for earlier, later in pairwise(losses)]
    return math.sqrt(fmean(differences) / 2 / len(losses)) if differences else 0.0


@dataclass(frozen=True)
class Restoration:
    """A run that had collapsed by `step` is again as after step `back_to`; `str` is one sentence about it."""

    step: int
    back_to: int
    loss: float
    """The mean of the last window."""
    best: float | None
    nothing: float | None
    factor: float
    """By what all rates are multiplied from now on."""
    block: str = ""
    """The first part of the network whose output grew, and how many times as large it was by then."""
    growth: float = 1.0
    why: str = ""
    """Where not the loss tells it."""

    def __str__(self) -> str:
        again = f"weights, optimiser and EMA are those of step {self.back_to} again, and rates are × {self.factor:.3g}"
        return f"step {self.step}: {self.cause}, so {again}{self._grown()}"

    @property
    def cause(self) -> str:
        if self.why:
            return self.why
        if not math.isfinite(self.loss) or self.best is None or self.nothing is None:
            return f"the loss was {self.loss:.4g}"
        if self.best >= self.nothing:
            return f"the loss was {self.loss:.4g} over {WINDOW} steps, after {self.best:.4g} at best"
        come = (self.loss - self.best) / (self.nothing - self.best)
        return (
            f"the loss was {self.loss:.4g} over {WINDOW} steps, {come:.0%} of the way from its best, {self.best:.4g}, "
            f"to {self.nothing:.4g}, that of predicting nothing"
        )

    def diagnosis(self, times: int) -> str:
        """What is said instead where going back did not help so many times."""
        tried = f"after {times} returns to step {self.back_to}, each at a lower rate"
        return f"{tried}, at step {self.step} {self.cause}{self._grown()}"

    def _grown(self) -> str:
        if not self.block:
            return ""
        if self.growth <= 1.1:
            return "; no block had grown"
        return f"; the first block to grow was {self.block}, × {self.growth:.3g}"
