"""The mean curve of several runs, and how far it may be off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .curves import Curve
from .intervals import mean_interval


@dataclass(frozen=True)
class Band:
    """Mean over runs at each step and Student's interval of it; None where a run is missing or not finite."""

    steps: tuple[int, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


def confidence_band(curves: Sequence[Curve], confidence: float = 0.95) -> Band:
    """The band of runs at every step that one of them was evaluated at; without low and high for a single run.

    Where a run has ended or diverged there is no mean: that of the others would look better than the method is.

    >>> confidence_band([Curve((1, 2), (2.0, 1.0)), Curve((1, 2), (4.0, math.inf))])
    Band(steps=(1, 2), mean=(3.0, None), low=(-9.7..., None), high=(15.7..., None))
    """
    steps = tuple(sorted({step for curve in curves for step in curve.steps}))
    tables = [dict(zip(curve.steps, curve.losses, strict=True)) for curve in curves]
    found = [mean_interval([table.get(step, math.nan) for table in tables], confidence) for step in steps]
    return Band(steps, *(tuple(getattr(one, name) for one in found) for name in ("value", "low", "high")))
