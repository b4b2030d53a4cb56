"""A full disk is told in one line that names the file, whichever write it was that found no room."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import assert_ends_with_error, run, sets
from run_cases import TINY

from scalelong.runs.run_dir import MetricsLog
from scalelong.sampling.images import save_grid
from scalelong.utils.atomic import Files, WriteError, replace_text

FULL = Path("/dev/full")


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")  # As the system says it: without the name of the file.


def message(path: Path) -> str:
    return rf"could not write {path}: No space left on device, [\d.]+ \w+ are free\. Free some space, then .* again\."


@pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is always full")
def test_a_line_of_the_log_that_finds_no_room_names_the_log() -> None:
    with pytest.raises(WriteError, match=message(FULL)):
        MetricsLog(FULL).write({"step": 1})


@pytest.mark.parametrize(
    ("patched", "write"),
    [
        ("scalelong.utils.atomic.Files.write_bytes", lambda path: replace_text(path, "text")),
        ("PIL.Image.Image.save", lambda path: save_grid(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), path)),
    ],
)
def test_a_file_that_finds_no_room_is_named_and_the_old_one_stays(
    patched: str, write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(patched, no_room)
    with pytest.raises(WriteError, match=message(path)):
        write(path)
    assert [found.name for found in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"


def test_a_run_that_cannot_write_its_recipe_says_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "write_bytes", no_room)
    result = run("train", "digits", *sets(*TINY), "--out", tmp_path / "run")
    assert_ends_with_error(result, message(tmp_path / "run" / "config.yaml"))
