"""What becomes of the jobs of a comparison when workers end them in other ways than by finishing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from comparison_cases import tiny_plan

from scalelong.compare.board import Watcher
from scalelong.compare.runner import ATTEMPTS, Conductor, Job


class Saying:
    """A pool whose workers say what they are told to."""

    def __init__(self, *answers: tuple[Job, dict[str, Any]]) -> None:
        self.answers: Sequence[tuple[Job, dict[str, Any]]] = answers

    def listen(self, seconds: float) -> Iterator[tuple[Job, dict[str, Any]]]:
        yield from self.answers


def ended(job: Job, status: str) -> Any:
    return Saying((job, {"kind": "end", "status": status, "message": None}))


@pytest.fixture
def conductor(tmp_path: Path) -> Conductor:
    return Conductor(tiny_plan(seeds=1), tmp_path, 1, Watcher(), "the same", "now")


def test_a_run_whose_worker_alone_was_told_to_stop_is_taken_up_again_however_often(conductor: Conductor) -> None:
    jobs = list(conductor.jobs)
    for _ in range(ATTEMPTS + 1):
        conductor._listen(ended(conductor.jobs.popleft(), "stopped"))
        assert list(conductor.jobs) == jobs
    assert not conductor.failures


def test_a_run_that_workers_die_of_counts_as_failed_in_the_end(conductor: Conductor) -> None:
    job = conductor.jobs[0]
    for _ in range(ATTEMPTS):
        assert conductor.jobs[0] is job
        conductor._listen(ended(conductor.jobs.popleft(), "lost"))
    assert job not in conductor.jobs
    assert job.run is not None and list(conductor.failures) == [str(job.run.folder)]
