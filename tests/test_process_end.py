"""How a process of the command line ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Whatever still exists when Python is taken apart is deleted then. Forks import nothing anew.
END = """
import atexit, json, os, sys
import scalelong.cli.app
from scalelong.cli import main

class Witness:
    def __del__(self, write=os.write):
        write(1, b"Python was taken apart")

for name, (processes, arguments) in json.loads(sys.argv[1]).items():
    if not os.fork():
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), 1)
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(processes)}
        sys.argv = ["scalelong", *arguments]
        witness = Witness()
        atexit.register(print, "exit handlers ran")
        main()
        os._exit(99)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print(name, code, flush=True)
"""
COMMANDS = {"fine": (["--version"], 0), "wrong": (["recipes", "--no-such-option"], 2)}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """By command and number of processes, the exit code, and the last line that the process wrote."""
    folder = tmp_path_factory.mktemp("ends")
    plan = {f"{name}-{count}": (count, COMMANDS[name][0]) for name in COMMANDS for count in (1, 2)}
    done = subprocess.run(
        [sys.executable, "-c", END, json.dumps(plan)], cwd=folder, capture_output=True, text=True, check=True
    )
    codes = dict(line.split() for line in done.stdout.splitlines())
    return {name: (int(codes[name]), last_line(folder / name)) for name in plan}


def last_line(file: Path) -> str:
    return file.read_text(encoding="utf-8").splitlines()[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_one_of_several_processes_ends_before_a_thread_of_torch_can_abort_it(
    name: str, ends: dict[str, tuple[int, str]]
) -> None:
    code = COMMANDS[name][1]
    assert ends[f"{name}-2"] == (code, "exit handlers ran")
    assert ends[f"{name}-1"] == (code, "Python was taken apart")
