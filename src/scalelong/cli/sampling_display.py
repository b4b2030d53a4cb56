"""How far drawing images is: a bar in a terminal, plain lines otherwise; on stderr, so that stdout is the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .errors import is_first_process

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def image_progress() -> Iterator[Callable[[float, int], None]]:
    """A function to be called with the number of images done and of all; an interruption ends in one line."""
    try:
        if not is_first_process():
            yield lambda done, count: None
        elif Console(stderr=True).is_terminal:
            with bar() as update:
                yield update
        else:
            yield Lines().update
    except KeyboardInterrupt:
        if is_first_process():
            typer.echo("interrupted: what was drawn is kept, and the same command goes on from there", err=True)
        sys.exit(130)


@contextmanager
def bar() -> Iterator[Callable[[float, int], None]]:
    columns = TextColumn("{task.completed:.0f}/{task.total:.0f} images"), BarColumn(), TimeRemainingColumn(compact=True)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("images", total=None)
        yield lambda done, count: progress.update(task, completed=done, total=count)


class Lines:
    """A line from time to time."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def update(self, done: float, count: int) -> None:
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            print(f"{int(done)} of {count} images", file=sys.stderr, flush=True)
