"""A lock is held by one process, and released however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scalelong.utils.atomic import Busy, locked

HOLD = """
import sys, time
from pathlib import Path
from scalelong.utils.atomic import locked

with locked(Path(sys.argv[1]), busy="another process is here"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_is_refused_at_once_while_another_process_holds_it_and_free_when_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "folder" / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            message = "^another process is here: wait for it, or stop it first$"
            with pytest.raises(Busy, match=message), locked(file, busy="another process is here"):
                pytest.fail("two processes hold the lock")
        finally:
            os.kill(holder.pid, signal.SIGKILL)
    with locked(file, busy="another process is here", wait=None):
        pass


def test_a_folder_made_for_a_lock_stays_only_if_something_was_written_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with locked(folder / ".lock", busy="busy"):
        assert folder.is_dir()
    assert not folder.exists()
    with locked(folder / ".lock", busy="busy"):
        (folder / "file").write_text("begun")
    with locked(folder / ".lock", busy="busy"):
        (folder / "file").unlink()
    assert folder.is_dir()


def test_a_folder_may_be_renamed_under_its_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "partial" / ".lock", busy="busy"):
        (tmp_path / "partial").rename(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "whole"]
