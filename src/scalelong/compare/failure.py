"""When a run has failed: the one definition of every command.

A run fails if its loss is not finite, if the guard gives it up, or if it ends without having learned. What it must have
learned is fixed before the first run: a share of the way from the loss of predicting nothing to that of a denoiser with
one number for each time. No verdict depends on what other runs did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Cause = Literal["not finite", "given up", "did not learn"]

CLEARLY = 0.1
"""The share of what it must gain below which a run shows no sign of learning."""


@dataclass(frozen=True)
class Reference:
    """Two losses that need no training: `nothing` of the best prediction that does not see the noisy image, `simple` of
    the best that is linear in it with one number for each time.

    >>> Reference(1.0, 0.2).limit(0.5)
    0.6
    """

    nothing: float
    simple: float = 0.0

    def limit(self, must_gain: float) -> float:
        """The loss that a run must come down to: so much of the way from `nothing` to `simple`."""
        return self.nothing - must_gain * (self.nothing - self.simple)


def cause_of_failure(loss: float, limit: float, *, given_up: bool = False) -> Cause | None:
    """Why a run that has ended with this loss has failed; None if it has not.

    >>> cause_of_failure(0.14, 0.6), cause_of_failure(0.99, 0.6), cause_of_failure(float("nan"), 0.6)
    (None, 'did not learn', 'not finite')
    """
    if given_up:
        return "given up"
    if not math.isfinite(loss):
        return "not finite"
    return "did not learn" if loss > limit else None


def has_clearly_failed(losses: Sequence[float], reference: Reference, must_gain: float, planned: int) -> bool:
    """Whether a run may be stopped, by its losses so far, evenly spaced, of as many as are `planned`.

    Either the last is not finite, or half of the run is over, and in the last quarter it was never a tenth of the way
    to what it must come down to.

    >>> has_clearly_failed([1.0, 0.3, 1.0, 1.0], Reference(1.0), 0.5, planned=8)
    True
    >>> has_clearly_failed([1.0, 0.9, 0.9, 0.9], Reference(1.0), 0.5, planned=8)
    False
    """
    if losses and not math.isfinite(losses[-1]):
        return True
    window = losses[-max(1, planned // 4) :]
    return 2 * len(losses) >= planned and all(loss > reference.limit(CLEARLY * must_gain) for loss in window)
