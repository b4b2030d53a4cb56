"""Keeps numbers that are not finite out of the weights, and says where they began."""

from .nonfinite import Guard, SpikeDetector, TrainingDiverged

__all__ = ["Guard", "SpikeDetector", "TrainingDiverged"]
