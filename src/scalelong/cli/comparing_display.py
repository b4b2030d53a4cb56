"""The progress of a comparison: a table that is kept up to date in a terminal, plain lines in a pipe or a file."""

from __future__ import annotations

import statistics
import time

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..compare.board import Board, RunState, Watcher
from ..compare.plan import PlannedRun
from ..training.logger import clock
from .console import print_now

MARKS = {"finished": "●", "diverged": "✗", "failed": "!", "running": "◐", "pending": "·"}
LINE_SECONDS = 30.0


def choose_watcher() -> Watcher:
    return LiveTable() if Console().is_terminal else Lines()


class Lines(Watcher):
    """One line for each run that ends, and how far all are every half minute."""

    def __init__(self) -> None:
        self.said = time.monotonic()

    def start(self, board: Board) -> None:
        print_now(f"{len(board.states)} runs of {board.plan.steps} steps, {board.ended} of them done")

    def update(self, board: Board) -> None:
        if time.monotonic() - self.said > LINE_SECONDS:
            self.said = time.monotonic()
            print_now(overall(board))

    def ended(self, board: Board, run: PlannedRun, message: str | None) -> None:
        state = board.state(run)
        why = f": {message}" if message else ""
        print_now(f"{run.arm.id} seed {run.seed} {state.status}{why}{loss_text(state)}; {overall(board)}")

    def note(self, message: str) -> None:
        print_now(message)


class LiveTable(Watcher):
    """A table of all arms, redrawn in place."""

    def __init__(self) -> None:
        self.live = Live(auto_refresh=False, transient=True)

    def start(self, board: Board) -> None:
        self.live.start()
        self.update(board)

    def update(self, board: Board) -> None:
        self.live.update(progress_table(board), refresh=True)

    def ended(self, board: Board, run: PlannedRun, message: str | None) -> None:
        if message:
            self.note(f"{run.arm.id} seed {run.seed} {board.state(run).status}: {message}")
        self.update(board)

    def note(self, message: str) -> None:
        self.live.console.print(Text(message))

    def stop(self) -> None:
        self.live.stop()


def progress_table(board: Board) -> Table:
    """One row for each arm: a mark for every seed, how far they are, and the mean of their last validation losses."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, caption=overall(board))
    several = len({arm.setting for arm in board.plan.arms}) > 1
    for header in ("method", *(["setting"] if several else []), "seeds"):
        table.add_column(header, no_wrap=True)
    for header in ("done", "validation loss"):
        table.add_column(header, justify="right", no_wrap=True)
    for arm in board.plan.arms:
        states = board.of_arm(arm)
        marks = "".join(MARKS[state.status] for state in states)
        losses = [state.loss for state in states if state.loss is not None]
        loss = f"{statistics.fmean(losses):.4f}" if losses else ""
        cells = (arm.label, *([arm.setting] if several else []), marks, f"{share_done(states, board.plan.steps):.0%}")
        table.add_row(*map(Text, (*cells, loss)))
    return table


def share_done(states: list[RunState], steps: int) -> float:
    """A run that diverged or failed is done, however few its steps."""
    return statistics.fmean(min(1, s.step / steps) if s.status in ("pending", "running") else 1 for s in states)


def overall(board: Board) -> str:
    left = board.seconds_left()
    time_left = "" if left is None else f", about {clock(left)} left"
    return f"{board.ended} of {len(board.states)} runs done{time_left}"


def loss_text(state: RunState) -> str:
    return "" if state.loss is None else f", validation loss {state.loss:.4f}"
