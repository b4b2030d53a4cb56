"""Watches skips and blocks in any training loop, and changes nothing."""

from .monitor import SkipMonitor
from .readings import oscillation_index
from .states import Status

__all__ = ["SkipMonitor", "Status", "oscillation_index"]
