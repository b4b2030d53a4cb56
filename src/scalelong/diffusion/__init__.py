"""Diffusion: noise schedules, the process that noises and scores, and samplers."""

from .guidance import noise_predictor
from .process import (
    SCHEDULES,
    CosineSchedule,
    DiffusionProcess,
    LinearSchedule,
    Loss,
    Prediction,
    Schedule,
    SqrtLinearSchedule,
    Time,
    build_schedule,
)
from .samplers import SAMPLERS, sample, to_uint8

__all__ = [
    "SAMPLERS",
    "SCHEDULES",
    "CosineSchedule",
    "DiffusionProcess",
    "LinearSchedule",
    "Loss",
    "Prediction",
    "Schedule",
    "SqrtLinearSchedule",
    "Time",
    "build_schedule",
    "noise_predictor",
    "sample",
    "to_uint8",
]
