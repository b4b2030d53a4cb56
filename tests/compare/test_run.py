"""What becomes of the jobs of a comparison when their processes end in other ways than by finishing."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison_cases import tiny_plan

from scalelong.compare.jobs import End
from scalelong.compare.run import ATTEMPTS, Display, Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tiny_plan(seeds=1), tmp_path, 1, Display(), "the same", "now")


def test_a_run_whose_process_alone_was_told_to_stop_is_resumed_however_often(launcher: Launcher) -> None:
    jobs = list(launcher.jobs)
    for _ in range(ATTEMPTS + 1):
        launcher._end(launcher.jobs.popleft(), End("stopped"))
        assert list(launcher.jobs) == jobs
    assert not launcher.failures


def test_a_run_that_processes_die_of_counts_as_failed_in_the_end(launcher: Launcher) -> None:
    job = launcher.jobs[0]
    for _ in range(ATTEMPTS):
        assert launcher.jobs[0] is job
        launcher._end(launcher.jobs.popleft(), End("lost"))
    assert job not in launcher.jobs
    assert list(launcher.failures) == [str(launcher.runs[job.path].folder)]
