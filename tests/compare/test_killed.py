"""A comparison that is stopped at any moment and resumed gives the tables of one that never was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from comparison_cases import lasting

PROGRAM = Path(__file__).with_name("killed_comparisons.py")
METHODS = ["none", "cs", "ls"]
OBSTACLE = "runs/cs/seed-1/thesis.tex"


def in_processes(*plans: dict[str, Any], timeout: float = 600) -> str:
    command = [sys.executable, str(PROGRAM), json.dumps(plans, default=str)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    logs = [path.read_text() for plan in plans for path in Path(plan["out"]).glob("logs/*")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    return done.stdout


def tables(out: Path) -> dict[str, Any]:
    results = json.loads((out / "results.json").read_text())
    assert results["status"] == "finished" and results["runs_done"] == results["runs_total"]
    return lasting(results)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison that was left alone, one with a run that failed, and one that was stopped in every way."""
    folder = tmp_path_factory.mktemp("two")
    whole = {"out": folder / "whole", "methods": METHODS[:2]}
    failed = {**whole, "out": folder / "failed", "obstacle": OBSTACLE}
    troubled = {**whole, "out": folder / "troubled", "ends": ["SIGKILL", "SIGTERM", "SIGKILL", "worker"]}
    asked = {**whole, "out": folder / "asked", "ends": ["everyone", "told"]}
    in_processes(whole, failed, troubled, asked)
    return folder


def test_killed_told_to_stop_and_without_a_worker_it_gives_the_same_tables(two: Path) -> None:
    assert tables(two / "troubled") == tables(two / "whole")


def test_told_to_stop_with_all_its_workers_and_then_one_worker_alone_it_gives_the_same_tables(two: Path) -> None:
    assert tables(two / "asked") == tables(two / "whole")


def test_a_run_that_fails_is_named_the_others_go_on_and_it_is_made_up_for(two: Path) -> None:
    results = json.loads((two / "failed" / "results-with-failure.json").read_text())
    runs = {run["folder"]: run for arm in results["arms"] for run in arm["runs"]}
    failed = runs.pop(str(Path(OBSTACLE).parent))
    assert failed["status"] == "failed" and "holds other files" in failed["message"]
    assert {run["status"] for run in runs.values()} == {"finished"}
    assert results["status"] == "incomplete" and results["runs_done"] == 3
    (pair,) = results["comparisons"]
    assert pair["pairs"] == 1, "a seed without its partner is no pair"
    assert tables(two / "failed") == tables(two / "whole")


@pytest.mark.slow
def test_killed_ten_times_at_random_it_gives_the_same_tables(tmp_path: Path) -> None:
    whole = {"out": tmp_path / "whole", "methods": METHODS, "seeds": 3, "overrides": ["training.steps=40"]}
    in_processes(whole, {**whole, "out": tmp_path / "killed", "ends": ["SIGKILL"] * 10})
    assert tables(tmp_path / "killed") == tables(tmp_path / "whole")
