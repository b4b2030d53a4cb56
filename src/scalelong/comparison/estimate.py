"""How long a comparison will take: a few steps of each setting, timed, with nothing written."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from ..training import Config, Run, Trainer, find_start
from ..training.display import Silent
from .plan import Plan
from .pool import available_cores

WARM_UP, TIMED = 2, 5


def estimate_seconds(plan: Plan, workers: int) -> float:
    """Steps of all runs, at the speed of the baseline in each setting, shared among the workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, available_cores() // workers))
    try:
        bases = [arm for arm in plan.arms if arm.method == plan.baseline]
        speed = sum(seconds_per_step(arm.config) for arm in bases) / len(bases)
    finally:
        torch.set_num_threads(threads)
    return speed * plan.steps * len(plan.runs) / workers


def seconds_per_step(config: Config) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        trainer = Trainer(config, run, find_start(run, config), display=Silent())
        for _ in range(WARM_UP):
            trainer.train_step()
        began = time.perf_counter()
        for _ in range(TIMED):
            trainer.train_step()
        seconds = time.perf_counter() - began
        trainer.batches.close()
    return seconds / TIMED
