"""Diffusion: noise schedules, the process that noises and scores, and samplers."""

from .process import DiffusionProcess, Loss, Prediction
from .samplers import SAMPLERS, noise_predictor, sample, to_uint8
from .schedule import SCHEDULES, CosineSchedule, LinearSchedule, Schedule, SqrtLinearSchedule, Time, build_schedule

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
