"""How far a job is: a bar in a terminal, plain lines otherwise; on stderr, so that stdout is the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .errors import is_first_process

SECONDS_BETWEEN_LINES = 10.0

Show = Callable[[str, float, int], None]
"""Called with what is counted, how many of them are done, and of how many."""


@contextmanager
def shown_progress() -> Iterator[Show]:
    """A function to call with what is done; only the first process shows it, and an interruption ends in one line."""
    try:
        if not is_first_process():
            yield lambda what, done, count: None
        elif Console(stderr=True).is_terminal:
            with bar() as update:
                yield update
        else:
            yield Lines().update
    except KeyboardInterrupt:
        stop()


def stop() -> NoReturn:
    """End a command that was interrupted, and that can be gone on with."""
    if is_first_process():
        typer.echo("stopped: what is finished is kept, and the same command goes on with the rest", err=True)
    sys.exit(130)


@contextmanager
def bar() -> Iterator[Show]:
    """A bar that begins again whenever something else is counted."""
    numbers = TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}")
    with Progress(numbers, BarColumn(), TimeRemainingColumn(compact=True), console=Console(stderr=True)) as progress:
        tasks = {}

        def update(what: str, done: float, count: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=count)
            progress.update(tasks[what], completed=done, total=count)

        yield update


class Lines:
    """A line from time to time."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def update(self, what: str, done: float, count: int) -> None:
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            print(f"{int(done)} of {count} {what}", file=sys.stderr, flush=True)
