"""A comparison whose runs are commands: whoever gives them, in whatever order and however often, its tables are the
same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_fails, run, sets
from comparison_cases import TINY, files_in, lasting

from scalelong.compare import outcome

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm_array.sh"
COMPARE = ["compare", "digits", "--methods", "none,cs", "--seeds", "1", "--workers", "1"]
# One of the rates fails.
COMPARE += ["--lr", "4e-3,1", *sets(*TINY, "optim.warmup_steps=0")]


@pytest.fixture(scope="module", autouse=True)
def as_a_process_of_a_comparison() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def listed(*arguments: Any) -> list[list[str]]:
    done = run(*arguments, "--jobs")
    assert done.exit_code == 0, done.output
    return [line.split()[1:] for line in done.stdout.splitlines()]


def begun(folder: Path, *arguments: Any) -> list[list[str]]:
    """The jobs of a new comparison; its advice, which takes long, is there."""
    *commands, advice = listed(*(arguments or COMPARE), "--out", folder)
    assert advice == ["job", f"{folder}/kappa.json"]
    Path(advice[1]).write_text("{}")
    return commands


def tables(folder: Path) -> dict[str, Any]:
    return lasting(json.loads((folder / "results.json").read_text().replace(str(folder), "the same")))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison made by its jobs alone, the last first; not to be written to."""
    folder = tmp_path_factory.mktemp("jobs") / "out"
    commands = begun(folder)
    assert [command[1] for command in commands] == [
        f"{folder}/runs/{method}-lr{rate}/seed-0" for rate in ("0.004", "1") for method in ("none", "cs")
    ]
    for command in reversed(commands):
        done = run(*command)
        assert done.exit_code == 0, done.output
    assert "1 of 1" in run(*COMPARE, "--out", folder, "--collect").stdout
    return folder


def test_a_comparison_that_makes_its_runs_itself_takes_up_those_of_jobs_and_has_the_same_tables(
    made: Path, tmp_path: Path
) -> None:
    command, (first, *others) = [*COMPARE, "--out", tmp_path / "out"], begun(tmp_path / "out")
    assert run(*first).exit_code == 0 and listed(*command) == others
    assert f"{len(others)} jobs left: " in run(*command, "--collect").stdout
    done = run(*command)
    assert done.exit_code == 0 and listed(*command) == [], done.output
    assert tables(made) == tables(tmp_path / "out")


def test_jobs_that_are_done_are_listed_no_more_and_change_nothing(made: Path) -> None:
    before = files_in(made / "runs")
    done = run("job", made / "runs" / "none-lr1" / "seed-0")
    assert done.exit_code == 0 and "failed, " in done.stdout
    assert listed(*COMPARE, "--out", made) == [] and files_in(made / "runs") == before


def test_a_job_that_is_told_to_stop_saves_and_asks_to_be_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *_ = begun(tmp_path / "out")
    train = outcome.train

    def told(folder: Path, *arguments: Any, **options: Any) -> Any:
        options["display"].step = lambda step, loss: step == 4 and signal.raise_signal(signal.SIGTERM)
        return train(folder, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "train", told)
        done = run(*command)
        assert (done.exit_code, "stopped and saved" in done.stdout) == (143, True)
    done = run(*command)
    assert (done.exit_code, "finished" in done.stdout) == (0, True)


def test_a_job_that_breaks_off_is_an_error_and_is_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *_ = everything = begun(tmp_path / "out")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "train", full)
        done = run(*command)
    assert done.exit_code == 1 and "broke off: [Errno 28] No space left on device" in done.stderr
    assert listed(*COMPARE, "--out", tmp_path / "out") == everything


def test_what_is_no_job_is_refused(made: Path, tmp_path: Path) -> None:
    assert_fails(run("job", tmp_path / "run"), "is not in a comparison: scalelong compare RECIPE --jobs begins one")
    assert_fails(run("job", made / "runs" / "ls" / "seed-0"), "is none of the 5 jobs of ")
    assert_fails(run(*COMPARE, "--out", made, "--lr", "1,2", "--jobs"), "holds a comparison with none-lr0.004")


def test_the_jobs_of_a_search_lead_to_its_edges(tmp_path: Path) -> None:
    search = ["edge", "digits", "--methods", "none", "--seeds", "1", "--lr", "4e-3,1"]
    search += sets(*TINY, "optim.warmup_steps=0")
    command, commands, rounds = [*search, "--out", tmp_path / "out"], begun(tmp_path / "out", *search), 0
    while commands and rounds < 20:
        assert all(run(*each).exit_code == 0 for each in commands)
        commands, rounds = listed(*command), rounds + 1
    assert 1 < rounds < 20  # After the first rates some that are closer.
    assert run(*command, "--collect").exit_code == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_the_slurm_script_saves_and_requeues_a_task_whose_time_ends_and_its_tasks_make_the_tables(
    tmp_path: Path,
) -> None:
    """What Slurm does with the script: it starts it for each task with its number, and tells it to stop."""
    steps = sets("training.steps=300", "training.checkpoint_every=300", "training.validate_every=50")
    command = [*COMPARE, *steps, "--out", tmp_path / "out"]
    commands = begun(tmp_path / "out", *COMPARE, *steps)
    lines = [" ".join([sys.executable, "-m", "scalelong", *each]) for each in commands]
    (tmp_path / "jobs.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"

    def task(number: int) -> subprocess.Popen[bytes]:
        numbers = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": str(number), "PATH": path}
        return subprocess.Popen(["bash", SCRIPT, tmp_path / "jobs.txt"], env={**os.environ, **numbers})

    told, log = task(1), tmp_path / "out" / "runs" / "none-lr0.004" / "seed-0" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not log.is_file() or not log.stat().st_size:
        assert time.monotonic() < until
        time.sleep(0.05)
    told.send_signal(signal.SIGTERM)
    assert told.wait(60) == 143
    assert (tmp_path / "asked").read_text() == "requeue 17_1\n"
    assert [task(number).wait(300) for number in range(1, 5)] == [0, 0, 0, 0]
    assert run(*command, "--collect").exit_code == 0
    begun(tmp_path / "local", *COMPARE, *steps)
    assert run(*COMPARE, *steps, "--out", tmp_path / "local").exit_code == 0
    assert tables(tmp_path / "out") == tables(tmp_path / "local")
