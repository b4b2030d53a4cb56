"""What a run says while it runs: plain lines here; the command line has a progress bar for terminals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class Display:
    """Writes one line for each logged step and each event; `write` is the logger unless given."""

    def __init__(self, write: Callable[[str], None] = logger.info) -> None:
        self.write = write
        self.steps = 0

    def start(self, step: int, steps: int) -> None:
        """The loop is about to run from one step to another."""
        self.steps = steps

    def step(self, step: int, loss: float) -> None:
        """Called after every step; cheap."""

    def log(self, record: Mapping[str, Any], seconds_left: float) -> None:
        self.write(f"step {record['step']}/{self.steps}  {describe(record)}  {clock(seconds_left)} left")

    def note(self, message: str) -> None:
        self.write(message)

    def stop(self) -> None:
        """The loop has ended, in whatever way."""

    def leave(self) -> None:
        """The process ends at once, perhaps because it hangs: leave the terminal as it was, and wait for nothing."""


class Silent(Display):
    """Says nothing: for all processes but the first."""

    def __init__(self) -> None:
        super().__init__(lambda line: None)


def describe(record: Mapping[str, Any]) -> str:
    """The numbers of a logged step.

    >>> describe({"step": 1, "loss": 0.5, "lr": 1e-3, "grad_norm": 2.0, "images_per_second": 640.0})
    'loss 0.5000  rate 1.0e-03  gradient 2.00  640 images/s'
    """
    return (
        f"loss {record['loss']:.4f}  rate {record['lr']:.1e}  gradient {record['grad_norm']:.2f}  "
        f"{record['images_per_second']:.0f} images/s"
    )


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3_700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
