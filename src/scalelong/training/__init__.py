"""The training loop, EMA weights, and what a run logs."""

from .logger import Display, Lines
from .loop import Trainer, TrainResult, train
from .state import EMA

__all__ = ["EMA", "Display", "Lines", "TrainResult", "Trainer", "train"]
