"""Watches skips and blocks in any training loop, and changes nothing."""

from .monitor import SkipMonitor
from .oscillation import Diagnosis, oscillation_index

__all__ = ["Diagnosis", "SkipMonitor", "oscillation_index"]
