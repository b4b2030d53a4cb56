"""The skip monitor of a run: the trainer's part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from .logger import RunLogger

MakeMonitor = Callable[..., Any]
"""`scalelong.monitor.SkipMonitor`, or what is called like it."""


class Watching:
    """Writes down what a monitor reads; without one it does nothing."""

    def __init__(self, monitor: Any, journal: RunLogger) -> None:
        self.monitor, self.journal = monitor, journal

    def running(self) -> AbstractContextManager[Any]:
        """The time during which steps are read."""
        return nullcontext() if self.monitor is None else self.monitor

    def step(self, step: int) -> None:
        """Write down what was read in a step, and say it once if there is an oscillation."""
        if self.monitor is None or not self.monitor.step(step):
            return
        self.journal.record(step, self.monitor.latest)
        found = self.monitor.diagnosis()
        if found is not None and found.step == step:
            self.journal.record(step, {"event": "oscillation", **asdict(found), "message": str(found)})
            self.journal.note(str(found))

    def seek(self, step: int) -> None:
        if self.monitor is not None:
            self.monitor.seek(step)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Go on at a step; a checkpoint of a run without a monitor has no windows to go on with."""
        if self.monitor is not None and saved:
            self.monitor.load_state_dict(saved)
        else:
            self.seek(step)
