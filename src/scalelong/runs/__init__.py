"""A run's folder: checkpoints that lose nothing, metrics, and what is made of a trained network."""

from .checkpoint import Checkpoint, CheckpointError, CheckpointStore
from .run_dir import Run, RunError, find_resume_point, read_metrics

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Run",
    "RunError",
    "find_resume_point",
    "read_metrics",
]
