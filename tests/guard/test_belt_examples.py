"""The examples of the seat belt run as they are, with fewer steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plain_loop_trains_and_is_not_touched_at_a_rate_that_is_no_trouble() -> None:
    loss, done = example("seat_belt").train(1e-3, steps=40)
    assert 0 < loss < 1.1
    assert not done


def test_the_loop_of_accelerate_calls_it_once_per_step_of_the_optimiser() -> None:
    pytest.importorskip("accelerate")
    belt = example("seat_belt_accelerate").train(updates=22)
    assert belt.count == 22
    assert [snapshot.step for snapshot in belt.ring] == [0, 20]


def test_the_callback_of_lightning_calls_it_once_per_step_of_the_optimiser() -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    belt = example("seat_belt_lightning").train(steps=22)
    assert belt.count == 22
    assert [snapshot.step for snapshot in belt.ring] == [0, 20]
