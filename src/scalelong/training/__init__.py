"""The training loop, averaged weights, and a guard."""

from .display import Display
from .ema import EMA
from .guard import Guard, SpikeDetector, TrainingDiverged
from .trainer import Result, Trainer, train

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
