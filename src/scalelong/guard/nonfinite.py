"""Keeps numbers that are not finite out of the weights, and marks steps whose loss jumped.

Nothing here reads or writes files, and nothing counts: the training loop holds the counts and logs what happened.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal


class TrainingDiverged(RuntimeError):
    """Going back to a good checkpoint did not help; the message says what to change."""


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


def advice(decision: StepDecision, step: int, origin: str, rollbacks: int) -> str:
    """What to change in a run whose numbers are still not finite after so many rollbacks."""
    numbers = f"step {step}: loss {decision.loss:.4g}, gradient norm {decision.grad_norm:.4g}: {origin}"
    return (
        f"training diverged: after {rollbacks} rollbacks the numbers were still not finite ({numbers}). "
        "Lower the learning rate or warm up longer, clip gradients, scale the long skips (scaling.method=cs with a "
        "smaller kappa), or train in float32; other settings begin at the last checkpoint in a folder of their own: "
        "--resume CHECKPOINT --out OTHER."
    )


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
