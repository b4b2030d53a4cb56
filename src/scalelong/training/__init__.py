"""The training loop, EMA weights, and a guard."""

from ..guard.nonfinite import Guard, SpikeDetector, TrainingDiverged
from .display import Display
from .ema import EMA
from .loop import Result, Trainer, train

__all__ = [
    "Display",
    "EMA",
    "Guard",
    "Result",
    "SpikeDetector",
    "Trainer",
    "TrainingDiverged",
    "train",
]
