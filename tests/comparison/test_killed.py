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


def in_processes(*plans: dict[str, Any], timeout: float = 600) -> str:
    command = [sys.executable, str(PROGRAM), json.dumps(plans, default=str)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    logs = [path.read_text() for plan in plans for path in Path(plan["out"]).glob("workers.log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    return done.stdout


def tables(out: Path) -> dict[str, Any]:
    results = json.loads((out / "results.json").read_text())
    assert results["status"] == "finished" and results["runs_done"] == results["runs_total"]
    return lasting(results)


def test_killed_told_to_stop_and_without_a_worker_it_gives_the_same_tables(tmp_path: Path) -> None:
    whole = {"out": tmp_path / "whole", "methods": METHODS[:2]}
    stopped = {**whole, "out": tmp_path / "stopped", "ends": ["SIGKILL", "SIGTERM", "SIGKILL", "worker"]}
    in_processes(whole, stopped)
    assert tables(tmp_path / "stopped") == tables(tmp_path / "whole")


@pytest.mark.slow
def test_killed_ten_times_at_random_it_gives_the_same_tables(tmp_path: Path) -> None:
    whole = {"out": tmp_path / "whole", "methods": METHODS, "seeds": 3, "overrides": ["training.steps=40"]}
    in_processes(whole, {**whole, "out": tmp_path / "killed", "ends": ["SIGKILL"] * 10})
    assert tables(tmp_path / "killed") == tables(tmp_path / "whole")
