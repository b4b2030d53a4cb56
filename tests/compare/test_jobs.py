"""What a run does when signals come, and how its process is started and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from comparison_cases import tiny_plan

from scalelong.compare import jobs, outcome
from scalelong.config import Config
from scalelong.runs import Run
from scalelong.training.logger import Silent


class Told(Silent):
    """Sends this process some signals during a step."""

    def __init__(self, step: int, times: int = 1) -> None:
        super().__init__()
        self.at, self.times = step, times

    def step(self, step: int, loss: float) -> None:
        if step == self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGTERM)


def config() -> Config:
    return tiny_plan("cs", seeds=1).runs[0].config


def test_a_run_that_is_told_to_stop_at_its_last_step_measures_nothing_more_and_ends_when_it_is_resumed(
    tmp_path: Path,
) -> None:
    assert outcome.train_and_measure(tmp_path / "run", config(), Told(10)) is None
    assert not (tmp_path / "run" / outcome.FILE).exists()
    found = outcome.train_and_measure(tmp_path / "run", config())
    assert found is not None and found.status == "finished"


def test_a_signal_that_reaches_a_job_twice_does_not_keep_it_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(code: int) -> None:
        raise AssertionError(f"it ended at once, with exit code {code}")

    monkeypatch.setattr("scalelong.training.parallel.os._exit", die)
    monkeypatch.setattr("scalelong.training.parallel.ECHO_SECONDS", 0.0)
    for name, value in jobs.job_environment(0, 1).items():
        monkeypatch.setenv(name, value)
    assert outcome.train_and_measure(tmp_path / "run", config(), Told(5, times=2)) is None
    saved = Run(tmp_path / "run").checkpoints().latest()
    assert saved is not None and saved.step == 5


# Without a guard for __main__: the processes of jobs must not run the script again.
SCRIPT = """
from pathlib import Path
from scalelong.compare import jobs
from scalelong.config import load_recipe

jobs.PRELOADED = ["scalelong.compare.jobs"]  # All that these two need.
print("begin")
for work in (print, open):
    job = jobs.Job(Path("here"), load_recipe("digits"), Path(f"{work.__name__}.log"), work)
    process = jobs.submit(job, 0, 1)
    process.join()
    print(jobs.poll(job, process))
"""


def test_a_users_script_and_files_with_the_names_of_modules_do_not_break_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "working directory"
    folder.mkdir()
    for name in ("queue", "signal", "json"):
        (folder / f"{name}.py").write_text("raise SystemExit('not what was meant')")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=folder)
    begin, first, second = done.stdout.splitlines()
    assert (begin, first) == ("begin", "End(status='done', message=None)"), done.stderr
    assert (folder / "print.log").read_text().startswith("here "), "what a job prints is in its log"
    assert second.startswith("End(status='failed', message=") and "not Config" in second
    assert "Traceback" in (folder / "open.log").read_text()
    assert done.stderr == ""
