"""Watches skips and blocks in any training loop, and changes nothing."""

from .callbacks import AccelerateMonitor, LightningMonitor
from .diagnosis import Diagnosis
from .monitor import SkipMonitor
from .oscillation import oscillation_index

__all__ = ["AccelerateMonitor", "Diagnosis", "LightningMonitor", "SkipMonitor", "oscillation_index"]
