"""The commands train, sample and recipes: what they print and write, and how they fail."""

from __future__ import annotations

import errno
import re
import signal
import sys
from pathlib import Path

import pytest
from checkpoint_cases import contents
from command_line import assert_ends_with_error, assert_fails, run, sets
from run_cases import TINY, run_tiny
from torch import Tensor

from scalelong.config import load_recipe, parse_recipe, recipe_names
from scalelong.runs import Run
from scalelong.utils.atomic import Files

SETS = sets(*TINY)


def test_train_writes_the_run_and_says_what_comes_next(tmp_path: Path) -> None:
    result = run("train", "digits", *SETS, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"step 8/8  loss [\d.]+  lr [\d.e-]+  grad norm [\d.]+  \d+ images/s  0:00 left", lines[-2])
    assert lines[-1] == f"finished: {tmp_path}/run. For more samples: scalelong sample {tmp_path}/run"
    found = {path.name for path in (tmp_path / "run").iterdir()} - {".lock"}
    assert found == {"config.yaml", "environment.json", "metrics.jsonl", "checkpoints"}


def test_train_on_a_finished_run_says_so_and_changes_nothing(tmp_path: Path) -> None:
    run_tiny(tmp_path)
    before = contents(tmp_path)
    result = run("train", "--out", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{tmp_path} is finished: step 8 of 8; no step was left to train.")
    assert contents(tmp_path) == before


def test_train_without_a_recipe_resumes_the_run_in_the_folder(tmp_path: Path) -> None:
    run_tiny(tmp_path, "training.steps=3")
    result = run("train", "--out", tmp_path, "--set", "training.steps=5")
    assert result.stdout.startswith("resuming from step 3 ")
    assert Run(tmp_path).config().training.steps == 5
    assert Run(tmp_path).checkpoints().steps()[-1] == 5


def test_a_stopped_run_says_how_to_resume_and_exits_with_the_code_of_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelong.training import Display

    monkeypatch.setattr(Display, "step", lambda self, step, loss: signal.raise_signal(signal.SIGTERM))
    result = run("train", "digits", *SETS, "--out", tmp_path)
    assert result.exit_code == 143
    last = result.stdout.splitlines()[-1]
    assert last == f"stopped and saved at step 1 of 8. To resume: scalelong train --out {tmp_path}"


def test_a_dry_run_prints_the_recipe_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("train", "--dry-run", "--set", "scaling.method=ls")
    assert result.exit_code == 0
    assert parse_recipe(result.stdout).scaling.method == "ls"
    steps = load_recipe("digits").training.steps
    assert result.stdout.splitlines()[-1].endswith(f"sklearn:digits, steps 0 to {steps}, in runs/digits-ls")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no recipe 'nothing'"),
        (["digits", "--set", "optim.learning=1"], "unknown key"),
        (["digits", "--set", "data.source=./nowhere"], "nowhere' was not found"),
        (["digits", "--set", "data.channels=3"], "denoises C×H×W = 1×8×8, but the data gives 3×8×8"),
        (["digits", "--resume", "./nowhere"], "there is no checkpoint nowhere"),
        (["digits", *SETS, "--set", "training.trackers=[wandb]"], "wandb is not installed: pip install wandb"),
    ],
)
def test_what_cannot_be_trained_fails_in_one_line_and_writes_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_fails(run("train", *arguments), message)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_a_run_fails_in_one_line_and_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    before = contents(tmp_path)
    assert_fails(run("train", "digits", *SETS, "--out", tmp_path / "file"), "is a file: choose another --out")
    assert_fails(run("train", "digits", *SETS, "--out", tmp_path / "file" / "run"), "is a file: choose another --out")
    assert_fails(run("train", "digits", *SETS, "--out", tmp_path / "full"), "holds other files and no run")
    assert_fails(run("sample", tmp_path / "full"), "is not the folder of a run")
    assert contents(tmp_path) == before


def test_a_folder_without_a_run_is_not_begun_without_a_recipe(tmp_path: Path) -> None:
    assert_fails(run("train", "--out", tmp_path / "mistyped"), "there is no run in .*mistyped to resume: name a recipe")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission_fails_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelong.runs.run_dir.os.access", lambda path, mode: False)
    assert_fails(run("train", "digits", *SETS, "--out", tmp_path / "run"), "is not writable")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_fails_with_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = run("train", "digits", *SETS, "--out", tmp_path / "run")
    assert_fails(result, r'checkpoints and prepared data need safetensors: pip install "scalelong\[train\]"')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room_for", [0, 1])
def test_a_full_disk_fails_in_one_line_and_older_checkpoints_are_intact(
    room_for: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = Files.write_tensors, [0]

    def write_until_full(files: Files, path: Path, tensors: dict[str, Tensor]) -> None:
        calls[0] += 1
        if calls[0] > 3 * room_for + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(files, path, tensors)

    monkeypatch.setattr(Files, "write_tensors", write_until_full)
    result = run("train", "digits", *SETS, "--out", tmp_path)
    assert_ends_with_error(result, "could not save the checkpoint .*No space left.*then resume.")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000"][:room_for]
    monkeypatch.undo()
    assert run("train", "digits", *SETS, "--out", tmp_path).exit_code == 0


def test_what_fails_in_another_process_than_the_first_is_told_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelong.cli.console.FIRST_SPEAKS_SECONDS", 0.0)
    assert_fails(run("train", "nothing", RANK="3"), "process 3: there is no recipe 'nothing'")


def test_sample_writes_images_and_a_grid_that_depend_on_the_seed_alone(tmp_path: Path) -> None:
    run_tiny(tmp_path)
    result = run("sample", tmp_path, "-n", 3, "--steps", 4, "--seed", 5)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "samples" / "step-000008-ema-seed-5-ddpm-4-steps"
    assert result.stdout == f"3 images and grid.png: {folder}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["000000.png", "000001.png", "000002.png", "grid.png"]
    run("sample", tmp_path, "-n", 1, "--steps", 4, "--seed", 6)
    other = tmp_path / "samples" / "step-000008-ema-seed-6-ddpm-4-steps"
    assert (other / "000000.png").read_bytes() == (folder / "000001.png").read_bytes()
    run("sample", tmp_path, "-n", 1, "--steps", 4, "--seed", 6, "--weights", "raw")
    raw = tmp_path / "samples" / "step-000008-raw-seed-6-ddpm-4-steps"
    assert (other / "000000.png").read_bytes() != (raw / "000000.png").read_bytes()


def test_recipes_are_listed_one_per_line_with_parameters_data_and_steps() -> None:
    lines = run("recipes").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == recipe_names()
    digits = next(line for line in lines if line.startswith("digits"))
    assert re.match(r"digits +\d{3},\d{3} +sklearn:digits +[\d,]+ +\S", digits)


@pytest.mark.parametrize("command", ["train", "sample", "recipes"])
def test_help_shows_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"scalelong {command}" in result.stdout.split("Example", 1)[1]
