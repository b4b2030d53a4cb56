"""The progress of a run that trains: a bar in a terminal, plain lines in a pipe or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..training.logger import Display, describe
from .console import print_now, progress_lines

# What rich hides while a bar is shown, and a line of its own for what the shell says next.
SHOW_CURSOR = b"\x1b[?25h\n"


def choose_display() -> Display:
    return Bar() if Console().is_terminal else Lines()


class Lines(Display):
    """A line for each logged step; how far the work before the first step is goes to stderr."""

    def __init__(self) -> None:
        super().__init__(print_now)
        self.before = progress_lines()

    def show_progress(self, what: str, done: float, total: int) -> None:
        self.before(what, done, total)


class Bar(Display):
    """A progress bar with the latest numbers; events stand above it."""

    def __init__(self, console: Console | None = None) -> None:
        numbers = TextColumn("{task.fields[numbers]}")
        columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(compact=True), numbers)
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("training", numbers="")
        super().__init__(lambda line: self.progress.console.print(Text(line)))

    def start(self, step: int, steps: int) -> None:
        super().start(step, steps)
        self.progress.reset(self.task, total=steps, completed=step)
        self.progress.start()

    def step(self, step: int, loss: float) -> None:
        self.progress.update(self.task, completed=step)

    def log(self, record: Mapping[str, Any], seconds_left: float) -> None:
        self.progress.update(self.task, numbers=describe(record))

    def show_progress(self, what: str, done: float, total: int) -> None:
        self.progress.start()
        self.progress.update(self.task, total=total, completed=int(done), numbers=what)

    def stop(self) -> None:
        self.progress.stop()

    def leave(self) -> None:
        # rich would first wait for its own thread.
        os.write(self.progress.console.file.fileno(), SHOW_CURSOR)
