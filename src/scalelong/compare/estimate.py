"""How long a comparison will take: a few steps of each setting, timed, with nothing written."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from ..config import Config
from ..runs import Run, find_start
from ..training import Trainer
from ..training.display import Silent
from .plan import Plan
from .pool import threads_each

STEPS = 7


def estimate_seconds(plan: Plan, workers: int) -> float:
    """Steps of all runs, at the speed of the baseline in each setting, shared among the workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_each(workers))
    try:
        bases = [arm for arm in plan.arms if arm.method == plan.baseline]
        speed = sum(seconds_per_step(arm.config) for arm in bases) / len(bases)
    finally:
        torch.set_num_threads(threads)
    return speed * plan.steps * len(plan.runs) / workers


def seconds_per_step(config: Config) -> float:
    """The median of a few steps: what a first one loads or allocates counts nothing."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        trainer = Trainer(config, run, find_start(run, config), display=Silent())
        seconds = []
        for _ in range(STEPS):
            began = time.perf_counter()
            trainer.train_step()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
