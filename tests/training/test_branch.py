"""A run that begins at the checkpoint of another is a run of its own from its first moment on."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_cases import assert_same_run, run_tiny

from scalelong.training import Display, Run


class Crash(Exception):
    pass


class CrashAt(Display):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.crash_step = step

    def step(self, step: int, loss: float) -> None:
        if step == self.crash_step:
            raise Crash


def test_a_branch_interrupted_before_its_next_checkpoint_goes_on_where_it_branched_off(tmp_path: Path) -> None:
    run_tiny(tmp_path / "trunk")
    start = tmp_path / "trunk" / "checkpoints" / "step-000003"
    run_tiny(tmp_path / "whole", "optim.lr=1e-4", resume=start)
    with pytest.raises(Crash):
        run_tiny(tmp_path / "branch", "optim.lr=1e-4", resume=start, display=CrashAt(5))
    assert Run(tmp_path / "branch").checkpoints().steps() == [3]
    run_tiny(tmp_path / "branch", "optim.lr=1e-4")
    assert_same_run(tmp_path / "branch", tmp_path / "whole")
