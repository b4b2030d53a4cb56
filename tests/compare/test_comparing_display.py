"""What is shown while a comparison runs."""

from __future__ import annotations

import io
from typing import Any

import pytest
from comparison_cases import tiny_plan
from rich.console import Console

from scalelong.cli.compare_display import Lines, progress_table, quality_lines
from scalelong.compare.run import Progress, RunState


@pytest.fixture
def progress() -> Progress:
    plan = tiny_plan("none", "cs", seeds=3)
    progress = Progress(plan, {str(run.folder): RunState("pending", 0) for run in plan.runs})
    progress.states["runs/none/seed-0"] = RunState("finished", 10, 0.25)
    progress.states["runs/none/seed-1"] = RunState("failed", 3, None)
    progress.states["runs/cs/seed-0"] = RunState("running", 5, 0.5)
    return progress


def shown(progress: Progress) -> str:
    console = Console(width=100, force_terminal=True, color_system=None, file=io.StringIO())
    with console.capture() as captured:
        console.print(progress_table(progress))
    return captured.get()


def test_every_arm_has_a_line_with_its_seeds_its_share_and_its_loss(progress: Progress) -> None:
    text = shown(progress)
    none, cs = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("none", "CS"))
    assert none.split() == ["none", "●✗·", "67%", "0.2500"]
    assert cs.split() == ["CS", "κ=0.7", "◐··", "17%", "0.5000"]
    assert "2 of 6 runs done" in text and "left" not in text, "there is no speed yet"


def test_the_time_left_is_that_of_the_open_steps_at_the_speed_so_far(
    progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = next(run for run in progress.plan.runs if str(run.folder) == "runs/cs/seed-0")
    progress.advance(run, 9)
    assert progress.trained == 4
    monkeypatch.setattr("scalelong.compare.run.time.monotonic", lambda: progress.began + 8)
    # 1 step of this run and 10 of each of three more: none with seed 2, cs with seeds 1 and 2.
    assert progress.seconds_left() == 8 / 4 * (1 + 3 * 10)


def test_in_a_pipe_a_run_that_ends_is_one_line(progress: Progress, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {str(run.folder): run for run in progress.plan.runs}
    Lines().ended(progress, runs["runs/none/seed-0"], None)
    Lines().ended(progress, runs["runs/none/seed-1"], "loss nan")
    assert capsys.readouterr().out.splitlines() == [
        "none seed 0 finished, validation loss 0.2500; 2 of 6 runs done",
        "none seed 1 failed: loss nan; 2 of 6 runs done",
    ]


def quality(label: str, *steps: int) -> dict[str, Any]:
    """The part of an arm whose distance falls from 100 to 50."""
    curve = {"name": "FD-EffNet", "steps": steps, "mean": [100.0, 50.0]} if steps else None
    return {"label": label, "fd_curve": curve, "final_fd_raw": None}


def test_every_arm_is_shown_with_the_steps_of_its_own_evaluations() -> None:
    arms = [quality("none", 600, 1200), quality("CS", 400, 1200), quality("LS", 600, 1200), quality("norm")]
    assert quality_lines(arms) == [
        "FD-EffNet from step 600 to 1,200: none 100 → 50, LS 100 → 50",
        "FD-EffNet from step 400 to 1,200: CS 100 → 50",
    ]
