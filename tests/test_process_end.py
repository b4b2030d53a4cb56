"""How a process of the command line ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Whatever still exists when Python is taken apart is deleted then.
END = """
import atexit, os, sys
from scalelong.cli import main

class Witness:
    def __del__(self, write=os.write):
        write(1, b"Python was taken apart")

witness = Witness()
atexit.register(print, "exit handlers ran")
sys.argv[0] = "scalelong"
main()
"""


def end(*arguments: str, processes: int) -> tuple[int, str]:
    """The exit code of a command, and the last line that its process wrote."""
    command = [sys.executable, "-c", END, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "RANK": "0", "WORLD_SIZE": f"{processes}"}
    )
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["recipes", "--no-such-option"], 2)])
def test_one_of_several_processes_ends_before_a_thread_of_torch_can_abort_it(arguments: list[str], code: int) -> None:
    assert end(*arguments, processes=2) == (code, "exit handlers ran")
    assert end(*arguments, processes=1) == (code, "Python was taken apart")
