"""Damaged and hostile files of a run: the file is named, and the run goes on where nothing is lost that counts."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_ends_with_error, run
from run_cases import lasting_metrics, run_tiny, train_unet
from safetensors import SafetensorError

from scalelong.runs import CheckpointError, Run, RunError
from scalelong.runs.checkpoint import MANIFEST, STATE
from scalelong.runs.export import export_run, load_pipeline
from scalelong.runs.model import choose_checkpoint, load_network
from scalelong.utils import atomic
from scalelong.utils.atomic import describe_files, read_signed, replace_text, signed


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run_tiny(out, "training.steps=3", "training.keep_last=1")
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


DAMAGED = ["", "[", "[1]", "{}1", '{"a": 1}', '[{"step": "x"}]', '[{"precision": 3}]', "[" * 100_000]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_environment_is_named_and_the_run_goes_on(
    out: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = Run(out).environment_file
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert run_tiny(out, "training.steps=4").finished
    assert f"{file} is damaged" in caplog.text and "which no step depends on" in caplog.text
    assert [start["step"] for start in Run(out).starts()] == [3]
    assert [line["step"] for line in lasting_metrics(out)] == [1, 2, 3, 4]


def sign_again(checkpoint: Path) -> None:
    """A manifest that fits what is in the folder, as a stranger would make it."""
    content: dict[str, Any] = read_signed(checkpoint / MANIFEST)
    found = describe_files(checkpoint / name for name in content["files"])
    content["files"] = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in found.items()}
    (checkpoint / MANIFEST).write_bytes(signed(content))


def rewrite(out: Path, name: str, content: bytes) -> Path:
    (checkpoint,) = (out / "checkpoints").iterdir()
    (checkpoint / name).write_bytes(content)
    sign_again(checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    "change",
    [
        *({"step": value} for value in ("3", None, [3], True)),
        *(
            {"loss_sum": "x"},
            {"spikes": 3},
            {"ema_step": None},
            {"metrics_size": "all"},
            {"monitor": [1]},
            {"scaler": 1},
        ),
    ],
    ids=str,
)
def test_a_state_of_wrong_types_is_refused_by_name(out: Path, change: dict[str, Any]) -> None:
    before = Run(out).checkpoints().latest()
    assert before is not None
    rewrite(out, STATE, json.dumps(before.state() | change).encode())
    ((key, value),) = change.items()
    with pytest.raises(CheckpointError, match="is damaged: its state has") as refused:
        run_tiny(out, "training.steps=4")
    assert f"{value!r} as {key}. Resume from another one." in str(refused.value)


@pytest.mark.parametrize("content", [b"[1]", b"3", b"{", b"", b"[" * 100_000])
def test_a_state_that_is_none_is_refused_by_name(out: Path, content: bytes) -> None:
    rewrite(out, STATE, content)
    for use in (lambda: run_tiny(out, "training.steps=4"), lambda: choose_checkpoint(Run(out))):
        with pytest.raises(CheckpointError, match=r"step-000003 is damaged: state\.json"):
            use()


@pytest.mark.parametrize("recipe", [3, [1], {}, {"name": 3}])
def test_a_state_with_something_else_as_its_recipe_is_refused(out: Path, recipe: Any) -> None:
    before = Run(out).checkpoints().latest()
    assert before is not None
    rewrite(out, STATE, json.dumps(before.state() | {"recipe": recipe}).encode())
    with pytest.raises(ValueError, match="the checkpoint's recipe"):
        run_tiny(out, "training.steps=4")


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("group", ["model", "ema"])
def test_a_pickle_in_the_place_of_weights_is_refused_and_never_run(out: Path, tmp_path: Path, group: str) -> None:
    content = pickle.dumps(Runs(tmp_path / "mark"))
    rewrite(out, f"{group}.safetensors", content)
    with pytest.raises(CheckpointError, match=rf"is damaged: {group}\.safetensors is no safetensors file"):
        run_tiny(out, "training.steps=4")
    weights = "ema" if group == "ema" else "raw"
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        load_network(Run(out).config(), choose_checkpoint(Run(out)), weights)
    result = run("sample", out, "-n", "1", "--weights", weights)
    assert_ends_with_error(result, ".*is no safetensors file.*")
    assert not (tmp_path / "mark").exists()


def test_the_weights_of_another_network_are_refused_in_a_line(out: Path) -> None:
    before = Run(out).checkpoints().latest()
    assert before is not None
    atomic.write_tensors(before.path / "ema.safetensors", {"x": before.tensors("ema")["pos_embed"]})
    sign_again(before.path)
    with pytest.raises(RunError, match="holds the weights of another network than its recipe's") as refused:
        load_network(Run(out).config(), choose_checkpoint(Run(out)), "ema")
    assert "\n" not in str(refused.value)


# Exports


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("os error 28")])
def test_an_export_that_finds_no_room_ends_in_a_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    out = train_unet(tmp_path / "run", "scaling.method=none")

    def no_room(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("scalelong.runs.export.write_diffusers", no_room)
    target = tmp_path / "exported"
    result = run("export", out, "--to", "diffusers", "--out", target)
    assert_ends_with_error(result, f"could not write {target}: No space left on device, .* are free. Free some space.*")
    assert not target.exists() and not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("name", ["DDPMScheduler", "load_image", "utils", "Absent", 3])
def test_an_exported_folder_that_names_something_else_than_a_network_is_refused(tmp_path: Path, name: Any) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(RunError, match="which is no network of diffusers"):
        load_pipeline(tmp_path)


def test_the_files_of_an_export_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        done = export_run(train_unet(tmp_path / "run", "scaling.method=none"), "diffusers")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in done.folder.rglob("*") if path.is_file()}
    assert len(modes) > 3 and set(modes.values()) == {"0o644"}


# What killed processes leave behind

GONE = 2**22 + 1  # More than Linux counts to.


def leave(folder: Path, name: str, *, seconds: float, owner: int = GONE) -> Path:
    path = folder / f".tmp-{owner}-{name}"
    path.write_text("half")
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_what_a_killed_process_left_of_a_file_goes_when_the_file_is_written_next(tmp_path: Path) -> None:
    old = leave(tmp_path, "config.yaml", seconds=100)
    kept = [
        leave(tmp_path, "config.yaml", seconds=10, owner=GONE + 1),  # Perhaps of another machine, which is writing it.
        leave(tmp_path, "config.yaml", seconds=100, owner=os.getppid()),
        leave(tmp_path, "other.yaml", seconds=100),
    ]
    replace_text(tmp_path / "config.yaml", "new")
    assert not old.exists()
    assert all(path.exists() for path in kept)


def test_a_run_that_resumes_collects_what_was_left_of_its_own_files(out: Path) -> None:
    left = [leave(out, name, seconds=100) for name in ("config.yaml", "environment.json")]
    run_tiny(out, "training.steps=4")
    assert not any(path.exists() for path in left)
