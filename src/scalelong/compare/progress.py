"""How far a comparison is, and the display that is told of it while it runs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from ..runs import Run
from .grid import Arm, Plan, PlannedRun

TAIL = 1 << 20
"""Bytes at the end of a run's metrics in which its last validation loss is looked for."""


@dataclass
class RunState:
    """One run as it is now; `loss` is its last validation loss."""

    status: str
    step: int
    loss: float | None = None


@dataclass
class Progress:
    """The state of every run, by folder, and the speed since the command began."""

    plan: Plan
    states: dict[str, RunState]
    began: float = 0.0
    """When the first run was started."""
    trained: int = 0
    """Steps that were made since then."""

    def state(self, run: PlannedRun) -> RunState:
        return self.states[str(run.folder)]

    def of_arm(self, arm: Arm) -> list[RunState]:
        return [self.state(PlannedRun(arm, seed)) for seed in self.plan.seeds]

    @property
    def ended(self) -> int:
        return sum(state.status in ("finished", "diverged", "failed") for state in self.states.values())

    def advance(self, run: PlannedRun, step: int) -> None:
        """A run is at this step now; the first call for a run says where it starts or resumes."""
        state = self.state(run)
        self.began = self.began or time.monotonic()
        if state.status == "running":
            self.trained += max(0, step - state.step)
        state.status, state.step = "running", step

    def seconds_left(self) -> float | None:
        """By the speed since the command began; None before there is any."""
        elapsed = time.monotonic() - self.began
        unfinished = [state for state in self.states.values() if state.status in ("pending", "running")]
        steps = sum(self.plan.steps - state.step for state in unfinished)
        return elapsed / self.trained * steps if self.trained else None


class Display:
    """What a comparison shows while it runs; this one shows nothing."""

    def start(self, progress: Progress) -> None:
        """Called once, before the first run starts."""

    def update(self, progress: Progress) -> None:
        """Called several times a second."""

    def ended(self, progress: Progress, run: PlannedRun, message: str | None) -> None:
        """A run has ended, in whatever way."""

    def info(self, message: str) -> None:
        """Something that the user should know at once."""

    def stop(self) -> None:
        """Nothing is running any more."""


def read_progress(folder: Path) -> tuple[int, float | None]:
    """The step of a run and its last validation loss, from the end of its metrics."""
    path = Run(folder).metrics.path
    if not path.is_file():
        return 0, None
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - TAIL)
        file.seek(start)
        lines = file.read().split(b"\n")[bool(start) : -1]
    validated = [line for line in lines if b'"validation_loss_ema"' in line]
    step = json.loads(lines[-1])["step"] if lines else 0
    return step, float(json.loads(validated[-1])["validation_loss_ema"]) if validated else None
