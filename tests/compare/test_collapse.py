"""Where a run collapsed, read from its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_cases import run_tiny

from scalelong.compare.collapse import attempts_of, find_collapse, place_of, unlearned
from scalelong.runs import Run, RunError


def lines(*losses: float, first: int = 10, every: int = 10) -> list[dict[str, Any]]:
    return [{"step": first + every * n, "loss": loss, "lr": 1e-3} for n, loss in enumerate(losses)]


HEALTHY = (0.9, 0.6, 0.5, 0.45, 0.42, 0.4, 0.41, 0.39)


def test_a_loss_that_goes_back_to_that_of_predicting_nothing_is_a_collapse() -> None:
    (attempt,) = attempts_of(lines(*HEALTHY, *8 * [1.0]))
    assert place_of(attempt, 10, 1.0) == (80, 120)


def test_a_loss_that_falls_is_none() -> None:
    (attempt,) = attempts_of(lines(*HEALTHY, *8 * [0.38]))
    assert place_of(attempt, 10, 1.0) is None and unlearned(attempt, 0.6) is None


def test_a_run_that_ends_without_having_learned_left_off_where_it_was_best() -> None:
    (attempt,) = attempts_of(lines(0.9, 0.8, 0.95, 0.95, 0.94))
    assert unlearned(attempt, 0.6) == (20, 60)


def test_each_return_of_the_seat_belt_begins_another_attempt_with_other_batches() -> None:
    back = {"step": 60, "event": "rollback", "from_step": 100}
    first, second = attempts_of([*lines(*HEALTHY, 0.8, 0.95), back, *lines(0.4, 0.4, first=70)])
    assert (first.offset, first.failed_at, second.offset, second.failed_at) == (0, 100, 40, None)
    assert place_of(first, 10, 1.0) == (80, 100)
    assert [step for step, _ in second.losses] == [10, 20, 30, 40, 50, 60, 70, 80]


def test_steps_that_were_not_finite_are_where_it_began() -> None:
    skipped = [{"step": 85 + n, "event": "skipped", "loss": "nan"} for n in range(6)]
    (attempt,) = attempts_of([*lines(*HEALTHY), *skipped, {"step": 90, "event": "diverged", "message": "…"}])
    assert place_of(attempt, 10, 1.0) == (70, 90)


def test_a_run_that_did_not_collapse_is_one_line(tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", "training.must_gain=-9", "scaling.method=none")
    with pytest.raises(RunError, match=r"did not collapse: its training loss was .* at best, and that of"):
        find_collapse(Run(tmp_path / "run"))


def test_a_run_without_a_checkpoint_before_its_collapse_is_one_line(tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", "scaling.method=none")
    log = tmp_path / "run" / "metrics.jsonl"
    content = lines(*[0.1] * 60, *[5.0] * 60, every=1, first=1)
    log.write_text("".join(json.dumps(line) + "\n" for line in content))
    with pytest.raises(RunError, match="has no checkpoint of step 5 before it to replay it from"):
        find_collapse(Run(tmp_path / "run"), start=5)
    assert find_collapse(Run(tmp_path / "run"), start=6).checkpoints[0].step == 6
