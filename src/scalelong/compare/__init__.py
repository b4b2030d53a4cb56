"""Matched runs of several methods, and what they show: speed-ups, differences and bands with honest intervals."""

from .intervals import (
    Band,
    Curve,
    Difference,
    Estimate,
    confidence_band,
    largest_stable_rate,
    mean_interval,
    paired_difference,
    proportion_interval,
    rate_sensitivity,
)
from .speedup import Speedup, speedup

__all__ = [
    "Band",
    "Curve",
    "Difference",
    "Estimate",
    "Speedup",
    "confidence_band",
    "largest_stable_rate",
    "mean_interval",
    "paired_difference",
    "proportion_interval",
    "rate_sensitivity",
    "speedup",
]
