"""One run's held-out loss over training: smoothed, where it ends, and how long it takes to a given level."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BANDWIDTH = 0.5
"""Of the smoothing, in natural logarithms of the step: at step 1000 it reaches from 607 to 1649."""


@dataclass(frozen=True)
class Curve:
    """A run's held-out losses; one that diverged ends early, or with a loss that is not finite."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    seconds_per_step: float = 1.0

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.losses):
            raise ValueError(f"a curve has one loss for each step, not {len(self.losses)} for {len(self.steps)}")
        if any(later <= earlier for earlier, later in zip(self.steps, self.steps[1:], strict=False)):
            raise ValueError(f"the steps of a curve must grow: {self.steps}")
        if not (self.seconds_per_step > 0 and math.isfinite(self.seconds_per_step)):
            raise ValueError(f"seconds per step must be positive, not {self.seconds_per_step}")

    @property
    def last_step(self) -> int:
        """The last step with a finite loss after which none is broken; 0 without one."""
        return self.steps[-1] if self.steps and math.isfinite(self.losses[-1]) else 0


def smoothing(steps: Tensor, bandwidth: float = BANDWIDTH) -> Tensor:
    """The matrix that smooths losses by local lines in the logarithm of the step. Shape: (K,) → (K, K).

    A line, not a mean: at the last step all neighbours are earlier, and the mean of a falling curve is above its end.

    >>> steps = torch.tensor([100.0, 200.0, 300.0, 400.0]).double()
    >>> (smoothing(steps) @ (5 - steps.log())).allclose(5 - steps.log())  # a line stays what it is
    True
    """
    x = steps.double().log()
    away = x - x[:, None]
    weight = (1 - (away / bandwidth) ** 2).clamp(min=0)
    zeroth, first, second = ((weight * away**power).sum(1, keepdim=True) for power in range(3))
    spread = zeroth * second - first**2
    line = weight * (second - first * away) / spread.where(spread > 1e-12, 1)
    return torch.where(spread > 1e-12, line, weight / zeroth)


def smooth(steps: Tensor, losses: Tensor) -> Tensor:
    """Losses smoothed over their steps; one that is not finite counts as the highest of its run. Shape: (..., K)."""
    finite = losses.isfinite()
    highest = losses.where(finite, -torch.inf).amax(-1, keepdim=True)
    return losses.where(finite, highest) @ smoothing(steps).T


def log_steps_above(steps: Tensor, losses: Tensor, level: Tensor) -> Tensor:
    """Logarithm of the step at which a falling curve has come down to a level. Shape: (K,), (..., K), (...) → (...).

    It is measured as the time that the curve is above the level, in the logarithm of the step and with straight lines
    between evaluations. That is the crossing where there is one, and where a noisy curve crosses several times it is
    neither the first, which comes early by luck, nor the last, which comes late.

    >>> curve = torch.tensor([[8.0, 4.0, 2.0, 1.0]])
    >>> log_steps_above(torch.tensor([1.0, 10.0, 100.0, 1000.0]), curve, torch.tensor([3.0])).exp().tolist()
    [31.6...]
    """
    x = steps.double().log()
    above = losses - level[..., None]
    left, right = above[..., :-1], above[..., 1:]
    size = left.abs() + right.abs()
    share = (left.clamp(min=0) + right.clamp(min=0)) / size.where(size > 0, 1)
    return x[0] + (share * x.diff()).sum(-1)
