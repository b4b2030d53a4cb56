"""`scalelong why`: a collapse that was planted in a tiny run is replayed, and what saves the run is said."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import losses
from typer.testing import CliRunner

from scalelong.cli.app import app
from scalelong.compare import trials, why
from scalelong.compare.jobs import End, Job
from scalelong.compare.replay import Ended, Task, losses_of
from scalelong.compare.why import ask_why
from scalelong.config import load_recipe
from scalelong.runs import Run
from scalelong.training import train
from scalelong.training.logger import Silent

SETTINGS = (
    *("scaling.method=none", "training.seat_belt=false", "training.monitor_every=null", "training.sample_every=null"),
    *("training.validate_every=null", "data.validation_count=8", "training.checkpoint_every=20"),
    *("training.keep_last=20", "training.batch_size=8", "training.log_every=1", "training.steps=100"),
    *("model.depth=2", "model.embed_dim=16", "model.num_heads=2", "model.patch_size=4", "optim.lr=2e-2"),
)
BLOCK = "in_blocks.0"
TRIED = ("lr-half", "batches", "module", "cs", "ls")


def scale_block(run: Run) -> None:
    """Multiply a block's weights in the last checkpoint by 30, and not their averages."""
    store = run.checkpoints(20)
    last = store.latest()
    assert last is not None
    groups = {group: last.tensors(group) for group in last.groups}
    for name, value in groups["model"].items():
        if name.startswith(BLOCK) and value.ndim == 2:
            value.mul_(30)
    store.save(last.step, groups, last.state())


def work_here(jobs: deque[Job], workers: int, signals: Any, ended: Any, tick: Any) -> None:
    """In this process, where replays of a few steps take no time."""
    while jobs:
        job = jobs.popleft()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.work(job.path, job.config)
        ended(job, End("done"))
        tick(len(jobs))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a block scaled by 30 at step 60, which has collapsed, and been asked why."""
    folder = tmp_path_factory.mktemp("why") / "a run"
    train(load_recipe("digits-deep", [*SETTINGS, "training.steps=60"]), folder, display=Silent())
    scale_block(Run(folder))
    train(load_recipe("digits-deep", SETTINGS), folder, display=Silent())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(why, "work_off", work_here)
        patch.setattr(trials, "CHANGES", [one for one in trials.CHANGES if one.id in TRIED])
        ask_why(folder, replays=3, after=40)
    return folder


def answer(folder: Path) -> dict[str, Any]:
    return json.loads((folder / why.FILE).read_bytes())


def test_a_block_that_was_scaled_is_named_as_the_module(planted: Path) -> None:
    found = answer(planted)
    rows = {row["change"]: row for row in found["changes"]}
    assert rows["module"]["label"] == f"{BLOCK} as it was earlier"
    assert (rows["module"]["saved"], rows["unchanged"]["saved"]) == (3, 0)
    assert "module" in found["groups"] and found["likely"] == "module"


def test_it_says_that_the_fault_came_between_two_checkpoints(planted: Path) -> None:
    found = answer(planted)
    assert found["reproduced"] and found["survived_from"] == [40] and found["checkpoint"] == 60
    assert "From step 40 the exact replay survives, from step 60 it does not" in found["sentence"]


def test_the_replay_with_nothing_changed_has_the_losses_of_the_run(planted: Path) -> None:
    exact = next(planted.glob("why/replays/unchanged-60-*-0"))
    assert losses_of(exact, 60, 100) == losses(planted)[60:100]


def test_a_draw_has_other_noise_and_the_same_images(planted: Path) -> None:
    exact, other = (next(planted.glob(f"why/replays/unchanged-60-*-{draw}")) for draw in (0, 1))
    assert losses_of(exact, 60, 61) != losses_of(other, 60, 61)


def test_the_command_goes_on_from_a_checkpoint_that_is_there(planted: Path) -> None:
    words = shlex.split(answer(planted)["command"])
    assert words[:2] == ["scalelong", "train"]
    result = CliRunner().invoke(app, [*words[1:], "--dry-run"])
    assert result.exit_code == 0 and "steps " in result.output


def test_replays_of_scaled_skips_begin_with_the_weights_of_the_unscaled_network(planted: Path) -> None:
    for change in ("cs", "ls"):
        replay = next(planted.glob(f"why/replays/{change}-60-*-0"))
        assert json.loads((replay / "replay.json").read_bytes())["step"] > 60
        assert torch.isfinite(torch.tensor(losses_of(replay, 60, 70))).all()


def test_what_was_replayed_is_not_replayed_again(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "CHANGES", [one for one in trials.CHANGES if one.id in TRIED])
    made: list[int] = []
    monkeypatch.setattr(why, "work_off", lambda jobs, *rest: made.append(len(jobs)))
    before = answer(planted)
    ask_why(planted, replays=3, after=40)
    assert not any(made) and answer(planted) == before


def test_a_signal_ends_it_and_leaves_the_answer_that_there_was(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "work_off", lambda jobs, workers, signals, *rest: setattr(signals, "received", 15))
    before = answer(planted)
    assert ask_why(planted, replays=3, after=40).signal == 15 and answer(planted) == before


def test_a_change_that_cannot_be_replayed_is_tried_once_and_told(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tried = tmp_path / "broken", []
    shutil.copytree(planted, run)
    for path in run.glob("why/replays/cs-60-*"):
        shutil.rmtree(path)

    def fail(jobs: deque[Job], workers: int, signals: Any, ended: Any, tick: Any) -> None:
        for job in jobs:
            tried.append(job.path.name)
            ended(job, End("failed", "no room"))

    monkeypatch.setattr(why, "work_off", fail)
    monkeypatch.setattr(trials, "CHANGES", [one for one in trials.CHANGES if one.id in TRIED])
    found = ask_why(run, replays=3, after=40).content
    assert len(tried) == 1 and found["failures"] == {tried[0]: "no room"}


def test_a_replay_whose_answer_is_damaged_is_made_again(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "damaged"
    shutil.copytree(planted, run)
    lost = next(run.glob("why/replays/unchanged-60-*-1/replay.json"))
    before = lost.read_bytes()
    lost.write_text("{}")
    monkeypatch.setattr(why, "work_off", work_here)
    monkeypatch.setattr(trials, "CHANGES", [one for one in trials.CHANGES if one.id in TRIED])
    ask_why(run, replays=3, after=40)
    assert lost.read_bytes() == before


@pytest.mark.parametrize(("dipped", "said"), [(True, "comes back by itself"), (False, "is not in its checkpoint")])
def test_an_exact_replay_that_survives_is_told(dipped: bool, said: str) -> None:
    task = Task(Path("checkpoint"), 60, 80, 120, {})
    assert said in why.described_origin(Ended(True, 120, 0.2, None, dipped=dipped), [], task)


def test_only_what_one_goes_on_from_keeps_its_weights(planted: Path) -> None:
    kept = {path.parent.parent.name.rpartition("-")[2] for path in planted.glob("why/replays/*/checkpoints/step-*")}
    assert kept == {"0"}


def test_the_page_of_the_run_says_it(planted: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(planted)])
    page = (planted / "report.html").read_text(encoding="utf-8")
    assert result.exit_code == 0 and "Why it collapsed" in page and f"{BLOCK} as it was earlier" in page


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["why", str(tmp_path)])
    assert result.exit_code == 2 and "is not the folder of a run" in result.output


@pytest.mark.slow
def test_it_does_so_in_processes_of_its_own(planted: Path, tmp_path: Path) -> None:
    run = tmp_path / "again"
    shutil.copytree(planted, run, ignore=shutil.ignore_patterns("why", "why.json", "report.html"))
    result = CliRunner().invoke(app, ["why", str(run), "--replays", "3", "--steps", "40", "--workers", "1"])
    assert result.exit_code == 0 and "Next: scalelong train" in result.output
    same = ("verdict", "groups", "collapse")
    assert {key: answer(run)[key] for key in same} == {key: answer(planted)[key] for key in same}
