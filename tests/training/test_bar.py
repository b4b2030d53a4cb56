"""The progress bar of a terminal: the latest numbers in it, events above it, and the cursor back in the end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from run_cases import run_tiny

from scalelong.cli.console import Bar
from scalelong.training import Display
from scalelong.training.parallel import StopSignals

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def screen(tmp_path: Path) -> Path:
    return tmp_path / "screen"


@pytest.fixture
def bar(screen: Path) -> Iterator[Bar]:
    with screen.open("w", encoding="utf-8") as file:
        yield Bar("digits: 8 steps", Console(file=file, force_terminal=True, width=120, color_system=None))


def test_a_bar_shows_how_far_a_run_is_its_latest_numbers_and_what_happened(
    bar: Bar, screen: Path, tmp_path: Path
) -> None:
    run_tiny(tmp_path / "run", "training.validate_every=8", display=bar)
    bar.progress.console.file.flush()
    shown = screen.read_text()
    last = shown.rpartition("8/8")[2]
    assert "loss 0." in last and "grad norm" in last and "images/s" in last
    assert "digits: 8 steps" in shown and "step 8: validation loss" in shown
    assert shown.count(HIDE) == shown.count(SHOW) == 1


def test_a_run_ended_by_a_second_signal_leaves_the_terminal_with_its_cursor(
    bar: Bar, screen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("scalelong.training.parallel.os._exit", codes.append)
    bar.start(0, 8)
    with StopSignals(leave=bar.leave):
        signal.raise_signal(signal.SIGINT)
        assert SHOW not in screen.read_text()
        signal.raise_signal(signal.SIGINT)
    assert codes == [130] and SHOW in screen.read_text()
    bar.stop()


def test_a_bar_has_all_that_a_display_has() -> None:
    asked = {name for name in vars(Display) if not name.startswith("_")}
    assert asked <= set(dir(Bar))
