"""Grids of samples: drawn at their steps, never at the cost of a checkpoint or of a quick end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from run_cases import SignalAt, assert_same_run, run_tiny

from scalelong.runs import Run

SAMPLED = ("training.sample_every=4", "sampling.steps=2")


def grids(out: Path) -> list[str]:
    return sorted(path.name for path in Run(out).samples.glob("*"))


def fail(*_: Any) -> None:
    raise MemoryError


def test_a_grid_that_fails_costs_no_step_and_is_drawn_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (*SAMPLED, "training.checkpoint_every=4")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("scalelong.training.samples.save_grid", fail)
        run_tiny(tmp_path, *overrides)
    assert Run(tmp_path).checkpoints().steps() == [0, 4]
    assert run_tiny(tmp_path, *overrides).trained == 4
    assert grids(tmp_path) == ["step-000004.png", "step-000008.png"]


def test_a_signal_ends_the_run_without_the_grid_of_its_step_which_is_drawn_when_it_goes_on(tmp_path: Path) -> None:
    assert run_tiny(tmp_path, *SAMPLED, display=SignalAt(4, signal.SIGTERM)).step == 4
    assert grids(tmp_path) == []
    run_tiny(tmp_path, *SAMPLED)
    assert grids(tmp_path) == ["step-000004.png", "step-000008.png"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_grid_of_the_last_step_is_drawn_at_the_next_start_if_a_signal_came_before_it(
    number: int, tmp_path: Path
) -> None:
    assert run_tiny(tmp_path / "whole", *SAMPLED).finished
    run_tiny(tmp_path / "run", *SAMPLED, display=SignalAt(8, number))
    assert grids(tmp_path / "run") == ["step-000004.png"]
    again = run_tiny(tmp_path / "run", *SAMPLED)
    assert (again.finished, again.trained) == (True, 0)
    grid = Path("samples", "step-000008.png")
    assert (tmp_path / "run" / grid).read_bytes() == (tmp_path / "whole" / grid).read_bytes()
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_the_grid_of_the_last_step_that_failed_is_drawn_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (*SAMPLED, "training.sample_every=8")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("scalelong.training.samples.save_grid", fail)
        run_tiny(tmp_path, *overrides)
    assert grids(tmp_path) == []
    assert run_tiny(tmp_path, *overrides).trained == 0
    assert grids(tmp_path) == ["step-000008.png"]


@pytest.mark.parametrize("overrides", [SAMPLED, ("training.sample_every=null",)])
def test_a_finished_run_that_owes_no_grid_builds_nothing(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tiny(tmp_path, *overrides)
    monkeypatch.setattr("scalelong.training.loop.Trainer", None)
    assert run_tiny(tmp_path, *overrides).trained == 0


def test_a_grid_that_is_there_is_not_drawn_again(tmp_path: Path) -> None:
    run_tiny(tmp_path, *SAMPLED, "training.steps=4")
    grid = Run(tmp_path).samples / "step-000004.png"
    grid.write_bytes(b"mine")
    run_tiny(tmp_path, *SAMPLED)
    assert grid.read_bytes() == b"mine"
