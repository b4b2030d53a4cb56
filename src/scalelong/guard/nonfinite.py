"""Keeps numbers that are not finite out of the weights, and marks steps whose loss jumped.

Nothing here reads or writes files: what happened is returned as records, for the training loop to log.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .origin import Origin, find_first_nonfinite

__all__ = ["Guard", "NonFinite", "Origin", "Spike", "SpikeDetector", "TrainingDiverged", "StepDecision"]


class TrainingDiverged(RuntimeError):
    """Going back to a good checkpoint did not help; the message says what to change."""


@dataclass(frozen=True)
class NonFinite:
    """A step whose loss or gradient was not finite, and where that began, if it could be found."""

    step: int
    loss: float
    grad_norm: float
    origin: Origin | None
    consecutive: int
    rollbacks: int

    def __str__(self) -> str:
        numbers = f"step {self.step}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"
        return f"{numbers}: {self.origin or 'where it began could not be found'}"


@dataclass(frozen=True)
class StepDecision:
    """What to do with a step's gradients: `ok` apply them, `skip` drop them, `rollback` drop them and go back.

    `overflow` drops them too, but only because the scaler of fp16 has to find its scale: nothing is wrong with the run.
    `loss` and `grad_norm` are plain numbers, already averaged over processes where there are several.
    """

    action: Literal["ok", "skip", "rollback", "overflow"]
    loss: float
    grad_norm: float
    event: NonFinite | None = None

    @property
    def ok(self) -> bool:
        return self.action == "ok"


class Guard:
    """Judges each step before the optimiser takes it.

    `max_skipped` bad steps in a row are skipped, the next asks for a rollback to the last checkpoint; after
    `max_rollbacks` of them TrainingDiverged is raised. `average` is applied to the two numbers of a step, (2,) → (2,),
    and must be a mean over processes where there are several, so that all of them decide alike.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_skipped: int = 10,
        max_rollbacks: int = 3,
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if max_skipped < 0 or max_rollbacks < 0:
            raise ValueError(f"counts must not be negative, got {max_skipped=}, {max_rollbacks=}")
        self.model = model
        self.max_skipped = max_skipped
        self.max_rollbacks = max_rollbacks
        self.average = average
        self.consecutive = 0
        self.rollbacks = 0

    def check(
        self,
        loss: Tensor | float,
        grad_norm: Tensor | float,
        *,
        step: int = 0,
        forwards: Sequence[Callable[[], Any]] = (),
        scale: Callable[[], float] | None = None,
    ) -> StepDecision:
        """Judge a step by its loss and the norm of its gradients, which is non-finite if any of them is.

        `forwards` repeat the forward passes of the batch's parts, and are called on a bad step only; see
        `find_first_nonfinite`. `scale` is what a scaler multiplied the loss by: above 1 it may be what made the
        gradients of a finite loss overflow.
        """
        loss, grad_norm = self._fetch(loss, grad_norm)
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.consecutive = 0
            return StepDecision("ok", loss, grad_norm)
        if math.isfinite(loss) and scale is not None and scale() > 1:
            return StepDecision("overflow", loss, grad_norm)
        origin = find_first_nonfinite(self.model, *forwards) if forwards else None
        action = self._count()
        event = NonFinite(step, loss, grad_norm, origin, self.consecutive, self.rollbacks)
        if self.rollbacks > self.max_rollbacks:
            raise TrainingDiverged(advice(event, self.max_rollbacks))
        if action == "rollback":
            self.consecutive = 0
        return StepDecision(action, loss, grad_norm, event)

    def state_dict(self) -> dict[str, int]:
        """The counts, as JSON: a resumed run decides as one that was never stopped. Not to be rolled back."""
        return {"consecutive": self.consecutive, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.consecutive, self.rollbacks = state["consecutive"], state["rollbacks"]

    def _fetch(self, loss: Tensor | float, grad_norm: Tensor | float) -> tuple[float, float]:
        """Both numbers in a single transfer, the only wait for the device in a step."""
        values = [value.detach() if isinstance(value, Tensor) else torch.tensor(value) for value in (loss, grad_norm)]
        device = next((value.device for value in values if value.device.type != "cpu"), values[0].device)
        pair = torch.stack([value.to(device, torch.float32).reshape(()) for value in values])
        first, second = (pair if self.average is None else self.average(pair)).tolist()
        return first, second

    def _count(self) -> Literal["skip", "rollback"]:
        self.consecutive += 1
        if self.consecutive <= self.max_skipped:
            return "skip"
        self.rollbacks += 1
        return "rollback"


def advice(event: NonFinite, max_rollbacks: int) -> str:
    return (
        f"training diverged: after {max_rollbacks} rollbacks the numbers were still not finite ({event}). "
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

    The deviation is 1.4826·MAD, which a few earlier spikes do not inflate, and at least 1 %. It judges from a half-full
    window on. A level that stays becomes the typical one, so that a jump to a plateau is marked while it is news.

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
        """Judge a loss by those before it, then remember it; one that is not finite is the guard's affair."""
        if not math.isfinite(loss):
            return None
        level = math.log(max(loss, 1e-30))
        spike = self._judge(step, loss, level) if 2 * len(self.logs) >= self.window else None
        self.logs.append(level)
        return spike

    def state_dict(self) -> dict[str, list[float]]:
        return {"logs": list(self.logs)}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        self.logs = deque(state["logs"], maxlen=self.window)

    def _judge(self, step: int, loss: float, level: float) -> Spike | None:
        middle = median(self.logs)
        spread = max(1.4826 * median(abs(log - middle) for log in self.logs), 0.01)
        deviations = (level - middle) / spread
        return Spike(step, loss, math.exp(middle), deviations) if deviations > self.threshold else None
