"""A run that is monitored trains to the same weights, and resumes exactly where it stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from run_cases import SignalAt, assert_same_run, final_tensors, lasting_metrics, run_tiny, tiny

from scalelong.config import RecipeError
from scalelong.monitor import SkipMonitor, Status
from scalelong.training import Lines

MONITORED = ("training.monitor_every=1", "training.steps=12", "scaling.method=ls")


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("monitored")
    run_tiny(out / "run", *MONITORED)
    return out / "run"


def test_a_monitored_run_has_the_same_weights_and_losses(monitored: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "plain", *MONITORED[1:])
    found, expected = final_tensors(monitored), final_tensors(tmp_path / "plain")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    lines = lasting_metrics(monitored)
    readings = [line for line in lines if "skip1/feature" in line]
    assert [line["step"] for line in readings] == list(range(1, 13))
    assert ["robustness" in line for line in readings] == [step == 10 for step in range(1, 13)]
    assert [line for line in lines if "lr" in line] == lasting_metrics(tmp_path / "plain")


def test_a_monitored_run_that_was_stopped_resumes_as_if_it_had_not_been(monitored: Path, tmp_path: Path) -> None:
    display = SignalAt(7, signal.SIGTERM)
    assert run_tiny(tmp_path / "run", *MONITORED, display=display).step == 7
    assert run_tiny(tmp_path / "run", *MONITORED).finished
    assert_same_run(tmp_path / "run", monitored)


class Alarmed(SkipMonitor):
    """Finds a block that grows at step 6, and steady again from step 8 on, whatever it sees."""

    @property
    def status(self) -> Status:
        step = self.count + 1
        return Status() if step < 6 else Status("growing", 6, "mid_block", 900.0) if step < 8 else Status("steady", 8)


def test_every_change_of_the_state_is_logged_and_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("scalelong.training.loop.SkipMonitor", Alarmed)
    run_tiny(tmp_path / "run", "training.monitor_every=2", display=Lines(said.append))
    events = [line for line in lasting_metrics(tmp_path / "run") if line.get("event") == "state"]
    assert [(event["step"], event["state"], event["block"]) for event in events] == [
        (6, "growing", "mid_block"),
        (8, "steady", ""),
    ]
    assert all(said.count(f"step {event['step']}: {event['message']}") == 1 for event in events)


def test_a_monitor_and_compile_exclude_each_other() -> None:
    with pytest.raises(RecipeError, match="compiled code calls no hooks"):
        tiny("training.monitor_every=1", "training.compile=true")
