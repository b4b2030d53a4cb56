"""Acts where a run goes wrong: a seat belt for any loop, and non-finite numbers kept out of the weights."""

from .belt import SeatBelt
from .losses import LossWatch, Restoration, SpikeDetector, StepDecision, TrainingDiverged, check_finite
from .nonfinite import Origin, find_first_nonfinite

__all__ = [
    "LossWatch",
    "Origin",
    "Restoration",
    "SeatBelt",
    "SpikeDetector",
    "StepDecision",
    "TrainingDiverged",
    "check_finite",
    "find_first_nonfinite",
]
