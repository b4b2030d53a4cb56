"""The training loop, EMA weights, and what a run logs."""

from .ema import EMA
from .logger import Display, Lines
from .loop import Trainer, TrainResult, train

__all__ = ["EMA", "Display", "Lines", "TrainResult", "Trainer", "train"]
