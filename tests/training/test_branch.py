"""A run that begins at the checkpoint of another is a run of its own from its first moment on."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_ends_with_error, run, sets
from run_cases import TINY, Crash, CrashAt, assert_same_run, run_tiny

from scalelong.runs import CheckpointError, Run, RunError
from scalelong.utils.atomic import Files

LOWER = "optim.lr=1e-4"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to branch off from; its folder is not to be written to."""
    trunk = tmp_path_factory.mktemp("runs") / "trunk"
    run_tiny(trunk)
    return trunk / "checkpoints" / "step-000003"


@pytest.fixture(scope="module")
def whole(start: Path) -> Path:
    """A branch that was never interrupted."""
    folder = start.parents[2] / "whole"
    run_tiny(folder, LOWER, resume=start)
    return folder


def crash(*_: Any, **__: Any) -> Any:
    raise Crash


def test_a_branch_interrupted_before_its_next_checkpoint_goes_on_where_it_branched_off(
    start: Path, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        run_tiny(tmp_path, LOWER, resume=start, display=CrashAt(5))
    assert Run(tmp_path).checkpoints().steps() == [3]
    run_tiny(tmp_path, LOWER)
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize(
    "moment", ["scalelong.runs.checkpoint.CheckpointStore.save", "scalelong.runs.run_dir.Run.begin"]
)
def test_a_branch_interrupted_while_it_begins_never_starts_from_other_weights(
    moment: str, start: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(moment, crash)
        run_tiny(tmp_path, LOWER, resume=start)
    assert not Run(tmp_path).exists
    if Run(tmp_path).checkpoints().steps():
        with pytest.raises(RunError, match="interrupted while it branched off .*--resume CHECKPOINT"):
            run_tiny(tmp_path, LOWER)
    run_tiny(tmp_path, LOWER, resume=start)
    assert_same_run(tmp_path, whole)


def test_a_branch_for_which_there_was_no_room_can_be_begun_again(
    start: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(Files, "write_tensors", full)
        run_tiny(tmp_path, LOWER, resume=start)
    run_tiny(tmp_path, LOWER, resume=start)
    assert_same_run(tmp_path, whole)


def test_a_run_without_a_checkpoint_can_still_begin_at_one_of_another(start: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((whole / "config.yaml").read_text())
    run_tiny(tmp_path, LOWER, resume=start)
    assert_same_run(tmp_path, whole)


def test_a_run_with_checkpoints_keeps_to_them(start: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path, "training.steps=1")
    with pytest.raises(RunError, match="holds a run already: choose another --out"):
        run_tiny(tmp_path, resume=start)


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("model.embed_dim=32", r"pos_embed is \(1, \d+, 16\) there and \(1, \d+, 32\) here"),
        ("model.depth=4", r"in_blocks.1.\S+ is absent there and \(\S+ here"),
    ],
)
def test_a_checkpoint_of_another_network_is_refused_in_one_line_and_leaves_nothing_behind(
    override: str, difference: str, start: Path, tmp_path: Path
) -> None:
    result = run("train", "digits", *sets(*TINY, override), "--out", tmp_path / "run", "--resume", start)
    assert_ends_with_error(result, f"{start} holds another network than the recipe's: {difference}.*")
    assert not (tmp_path / "run").exists()
