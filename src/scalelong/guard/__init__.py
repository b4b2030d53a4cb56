"""Keeps numbers that are not finite out of the weights, and says where they began."""

from .nonfinite import Origin, SpikeDetector, StepDecision, TrainingDiverged, check_finite, find_first_nonfinite

__all__ = ["Origin", "SpikeDetector", "StepDecision", "TrainingDiverged", "check_finite", "find_first_nonfinite"]
