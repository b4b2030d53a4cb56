"""Runs so small that a law about them takes seconds, and what it takes to compare two of them."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from scalelong.config import Config, load_recipe
from scalelong.runs import Run, find_resume_point, read_metrics
from scalelong.training import Display, Trainer, TrainResult, train
from scalelong.training.parallel import Parallel
from scalelong.utils.runtime import Rank

HERE = Path(__file__).resolve().parent

# The fields that differ between two runs of the same recipe.
TIMES = ("seconds", "images_per_second")

TINY = (
    *("model.embed_dim=16", "model.depth=2", "model.num_heads=2", "data.validation_count=10"),
    *("training.batch_size=8", "training.steps=8", "training.log_every=1", "training.checkpoint_every=3"),
    *("training.validate_every=null", "training.sample_every=null", "sampling.steps=4"),
)


UNET = (
    *("data.source=sklearn:digits", "data.image_size=8", "data.channels=1", "data.image_column=image"),
    *("data.label_column=null", "data.validation_split=null", "data.validation_count=10", "model.sample_size=8"),
    *("model.in_channels=1", "model.block_out_channels=[8, 16]", "model.depth=1", "model.attention=[]"),
    *("model.norm_num_groups=4", "diffusion.steps=20", "training.steps=2", "training.batch_size=8"),
    *("training.validate_every=2", "training.sample_every=null", "optim.lr=1e-2", "optim.warmup_steps=0"),
)


class SignalAt(Display):
    """Sends this process a signal during a step."""

    def __init__(self, step: int, number: int) -> None:
        self.at, self.number = step, number

    def step(self, step: int, loss: float) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)


class Crash(Exception):
    pass


class CrashAt(Display):
    """Ends the run without a word in the middle of things, after a step or more."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, step: int, loss: float) -> None:
        if step == self.at:
            raise Crash


def tiny(*overrides: str) -> Config:
    return load_recipe("digits", [*TINY, *overrides])


def run_tiny(out: Path, *overrides: str, **options: Any) -> TrainResult:
    return train(tiny(*overrides), out, **options)


def train_unet(out: Path, *overrides: str) -> Path:
    train(load_recipe("cifar10-tiny-unet", [*UNET, *overrides]), out)
    return out


def make_trainer(out: Path, *overrides: str, rank: Rank | None = None, **options: Any) -> Trainer:
    config, run = tiny(*overrides), Run(out)
    return Trainer(config, run, find_resume_point(run, config), Parallel.open(config.training, rank), **options)


def final_tensors(out: Path) -> dict[str, Tensor]:
    """Everything in a run's last checkpoint, by group and name."""
    checkpoint = Run(out).checkpoints().latest()
    assert checkpoint is not None
    return {
        f"{group}/{name}": value for group in checkpoint.groups for name, value in checkpoint.tensors(group).items()
    }


def lasting_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the fields that depend on the clock."""
    lines = read_metrics(out / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lasting_metrics(out) if "lr" in line]


def assert_same_run(found: Path, expected: Path) -> None:
    """Equal to the bit: weights, averages, optimiser, and every line of the log."""
    ours, theirs = final_tensors(found), final_tensors(expected)
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in theirs.items() if not tensor.equal(ours[name])]
    assert not different
    assert lasting_metrics(found) == lasting_metrics(expected)


@cache
def killed_runs() -> subprocess.Popen[str]:
    """The program that trains in processes of their own; it ends with this one, or when its input does."""
    program = subprocess.Popen(
        [sys.executable, str(HERE / "killed_runs.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    atexit.register(program.communicate)
    return program


def in_processes(*runs: dict[str, Any], folder: Path | None = None) -> None:
    """Do several runs one after another in processes of their own; see killed_runs.py for what a run may say."""
    program = killed_runs()
    assert program.stdin is not None and program.stdout is not None
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as said:
        job = {"folder": folder or Path.cwd(), "said": said.name, "runs": runs}
        print(json.dumps(job, default=str), file=program.stdin, flush=True)
        code = program.stdout.readline()
        assert code == "0\n", said.read()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
