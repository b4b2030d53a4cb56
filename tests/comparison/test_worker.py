"""What a worker answers when signals come, and what it is started with."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from comparison_cases import tiny_plan

from scalelong.comparison import outcome, pool, worker
from scalelong.training import Config, Run
from scalelong.training.display import Silent

STOPPED = {"status": "stopped", "message": None}


class Told(Silent):
    """Sends this process some signals during a step."""

    def __init__(self, step: int, times: int = 1) -> None:
        super().__init__()
        self.at, self.times = step, times

    def step(self, step: int, loss: float) -> None:
        if step == self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGTERM)


def config() -> Config:
    return tiny_plan("cs", seeds=1).runs[0].config


def test_a_run_that_is_told_to_stop_at_its_last_step_measures_nothing_more_and_ends_when_it_goes_on(
    tmp_path: Path,
) -> None:
    assert worker.run(config(), tmp_path / "run", Told(10)) == STOPPED
    assert not (tmp_path / "run" / outcome.FILE).exists()
    assert worker.run(config(), tmp_path / "run", Silent())["status"] == "finished"


def test_a_signal_that_reaches_a_worker_twice_does_not_keep_it_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(code: int) -> None:
        raise AssertionError(f"it ended at once, with exit code {code}")

    monkeypatch.setattr("scalelong.training.signals.os._exit", die)
    monkeypatch.setattr("scalelong.training.signals.ECHO_SECONDS", 0.0)
    for name, value in pool.environment(0, 1).items():
        monkeypatch.setenv(name, value)
    assert worker.run(config(), tmp_path / "run", Told(5, times=2)) == STOPPED
    saved = Run(tmp_path / "run").checkpoints().latest()
    assert saved is not None and saved.step == 5
