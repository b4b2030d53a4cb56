"""How far a comparison is: what a display shows while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .plan import Arm, Plan, PlannedRun


@dataclass
class RunState:
    """One run as it is now; `loss` is its last validation loss."""

    status: str
    step: int
    loss: float | None = None


@dataclass
class Board:
    """The state of every run, by folder, and the speed since the command began."""

    plan: Plan
    states: dict[str, RunState]
    began: float = 0.0
    """When the first step since the command began was heard of."""
    trained: int = 0
    """Steps that were made since then."""

    def state(self, run: PlannedRun) -> RunState:
        return self.states[str(run.folder)]

    def of_arm(self, arm: Arm) -> list[RunState]:
        return [self.states[str(PlannedRun(arm, seed).folder)] for seed in self.plan.seeds]

    @property
    def ended(self) -> int:
        return sum(state.status in ("finished", "diverged", "failed") for state in self.states.values())

    def advance(self, run: PlannedRun, step: int) -> None:
        """Note how far a run is; a worker that begins a run tells where it takes it up."""
        state = self.state(run)
        self.began = self.began or time.monotonic()
        if state.status == "running":
            self.trained += max(0, step - state.step)
        state.status, state.step = "running", step

    def seconds_left(self) -> float | None:
        """By the speed since the command began; None before there is any."""
        elapsed = time.monotonic() - self.began
        open_steps = sum(
            self.plan.steps - state.step for state in self.states.values() if state.status in ("pending", "running")
        )
        return elapsed / self.trained * open_steps if self.trained else None


class Watcher:
    """What a comparison tells while it runs; this one says nothing."""

    def start(self, board: Board) -> None:
        """Called once, before the first run goes on."""

    def update(self, board: Board) -> None:
        """Called several times a second."""

    def ended(self, board: Board, run: PlannedRun, message: str | None) -> None:
        """A run has ended, in whatever way."""

    def note(self, message: str) -> None:
        """Something that the user should know at once."""

    def stop(self) -> None:
        """Nothing is running any more."""
