"""Grids of samples: drawn at their steps, never at the cost of a checkpoint or of a quick end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from run_cases import SignalAt, run_tiny

from scalelong.runs import Run

SAMPLED = ("training.sample_every=4", "sampling.steps=2")


def grids(out: Path) -> list[str]:
    return sorted(path.name for path in Run(out).samples.glob("*"))


def test_a_grid_that_fails_costs_no_step_and_is_drawn_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    overrides = (*SAMPLED, "training.checkpoint_every=4")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("scalelong.training.due.save_grid", fail)
        run_tiny(tmp_path, *overrides)
    assert Run(tmp_path).checkpoints().steps() == [0, 4]
    assert run_tiny(tmp_path, *overrides).trained == 4
    assert grids(tmp_path) == ["step-000004.png", "step-000008.png"]


def test_a_signal_ends_the_run_without_the_grid_of_its_step_which_is_drawn_when_it_goes_on(tmp_path: Path) -> None:
    assert run_tiny(tmp_path, *SAMPLED, display=SignalAt(4, signal.SIGTERM)).step == 4
    assert grids(tmp_path) == []
    run_tiny(tmp_path, *SAMPLED)
    assert grids(tmp_path) == ["step-000004.png", "step-000008.png"]


def test_a_grid_that_is_there_is_not_drawn_again(tmp_path: Path) -> None:
    run_tiny(tmp_path, *SAMPLED, "training.steps=4")
    grid = Run(tmp_path).samples / "step-000004.png"
    grid.write_bytes(b"mine")
    run_tiny(tmp_path, *SAMPLED)
    assert grid.read_bytes() == b"mine"
