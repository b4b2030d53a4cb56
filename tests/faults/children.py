"""Processes that are forked from one that has imported everything: a try costs little more than what it does."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from scalelong.cli.app import app


@dataclass(frozen=True)
class End:
    """How a process ended: its exit code, the negative number of the signal that ended it, and what it said."""

    code: int
    out: str
    err: str

    @property
    def refused(self) -> bool:
        """Whether it ended as a command does that cannot do what it was asked: code 2 and one line that says why."""
        lines = self.err.strip().splitlines()
        return self.code == 2 and bool(lines) and lines[-1].startswith("error: ") and not self.traced

    @property
    def traced(self) -> bool:
        """Whether it said more of Python than a user wants to read."""
        return "Traceback (most recent call last)" in self.err + self.out

    def __str__(self) -> str:
        return f"exit code {self.code}: {(self.err or self.out).strip()[-1500:]}"


class Child:
    """A function in a process of its own, whose output is kept in two files."""

    def __init__(self, function: Callable[[], object], said: Path, *, seconds: float = 120) -> None:
        self.said, self.deadline = said, time.monotonic() + seconds
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if not self.process:
            become(function, said)
        self.code: int | None = None

    @property
    def is_running(self) -> bool:
        if self.code is None:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def send(self, number: int) -> bool:
        """Send a signal; whether it came before the end."""
        if self.is_running:
            os.kill(self.process, number)
            return True
        return False

    def kill(self) -> bool:
        """End it by SIGKILL; whether it did not end by itself before."""
        self.send(signal.SIGKILL)
        return self.wait().code == -signal.SIGKILL

    def wait(self) -> End:
        """Let it end by itself; what hangs is killed, and told by the code of a signal."""
        pause = 0.001
        while self.is_running:
            if time.monotonic() > self.deadline:
                with suppress(ProcessLookupError):
                    os.kill(self.process, signal.SIGKILL)
            time.sleep(pause)
            pause = min(0.02, 1.5 * pause)
        assert self.code is not None
        return End(self.code, *(self.read(name) for name in ("out", "err")))

    def read(self, name: str) -> str:
        file = Path(f"{self.said}.{name}")  # A kill may come before it is there.
        return file.read_text(errors="replace") if file.exists() else ""


def become(function: Callable[[], object], said: Path) -> NoReturn:
    """Do nothing but this in the process, and end it as Python would."""
    code: object = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
        sys.stdout = open(1, "w", closefd=False, errors="replace")  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="replace", buffering=1)  # noqa: SIM115
        code = exit_code(function)
        sys.stdout.flush()
    finally:
        os._exit(code if isinstance(code, int) else 1)


def exit_code(function: Callable[[], object]) -> object:
    try:
        function()
    except SystemExit as end:
        return 0 if end.code is None else end.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def call(function: Callable[[], object], said: Path, *, seconds: float = 120) -> End:
    return Child(function, said, seconds=seconds).wait()


def command(*arguments: object) -> Callable[[], object]:
    """`scalelong …` as a user gives it."""
    return lambda: app([str(argument) for argument in arguments], prog_name="scalelong")


def sets(overrides: Sequence[str]) -> list[str]:
    """`--set` before each override."""
    return [part for override in overrides for part in ("--set", override)]
