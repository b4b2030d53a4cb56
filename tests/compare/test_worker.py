"""What a worker answers when signals come, and what it is started with."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from comparison_cases import tiny_plan

from scalelong.compare import outcome, pool, worker
from scalelong.config import Config
from scalelong.runs import Run
from scalelong.training.logger import Silent

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


def test_a_file_of_the_users_with_the_name_of_a_module_does_not_break_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("queue", "signal", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not what was meant')")
    monkeypatch.chdir(tmp_path)
    started = pool.Worker(tmp_path / "log", pool.environment(0, 1), ())
    try:
        assert started.process.stdout is not None
        said = started.process.stdout.readline()
        assert json.loads(said or b"null") == {"kind": "ready"}, (tmp_path / "log").read_text()
    finally:
        started.close()
