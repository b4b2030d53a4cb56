"""How far an evaluation is, told to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable

from ..sampling.sample_folder import Progress

Report = Callable[[str, float, int], None]
"""Called with what is counted, how many of them are done, and of how many."""

READ, DESCRIBED, DRAWN = "images of the dataset read", "images of the dataset described", "images drawn"


def unseen(what: str, done: float, count: int) -> None:
    """Nobody wants to know."""


def phase(report: Report, what: str) -> Progress:
    """The progress of one part of the work, by its name."""
    return lambda done, count: report(what, done, count)
