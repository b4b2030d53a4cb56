"""The progress of a run: a bar in a terminal, plain lines in a pipe or a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..training.logger import Display, describe

# What rich hides while a bar is shown, and a line of its own for what the shell says next.
SHOW_CURSOR = b"\x1b[?25h\n"


def choose_display() -> Display:
    return Bar() if Console().is_terminal else Display(print_now)


def print_now(line: str) -> None:
    """A line that is in the file at once, also when the process is killed later."""
    print(line, file=sys.stdout, flush=True)


class Bar(Display):
    """A progress bar with the latest numbers; events stand above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.progress = Progress(
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}"),
            console=console,
        )
        self.task: TaskID | None = None
        super().__init__(lambda line: self.progress.console.print(Text(line)))

    def start(self, step: int, steps: int) -> None:
        super().start(step, steps)
        self.task = self.progress.add_task("training", total=steps, completed=step, numbers="")
        self.progress.start()

    def step(self, step: int, loss: float) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=step)

    def log(self, record: Mapping[str, Any], seconds_left: float) -> None:
        if self.task is not None:
            self.progress.update(self.task, numbers=describe(record))

    def stop(self) -> None:
        self.progress.stop()

    def leave(self) -> None:
        # rich would first wait for its own thread.
        os.write(self.progress.console.file.fileno(), SHOW_CURSOR)
