"""SIGTERM and SIGINT: the first asks the loop to stop after its step, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGINT)

# A launcher passes on a signal that the terminal has already sent to every process: that is one signal, not two.
ECHO_SECONDS = 2.0

SUPERVISED = "SCALELONG_SUPERVISED"
"""Set for a process whose parent passes signals on, and ends it if it hangs: no second signal needs to."""


class StopSignals:
    """While entered, notes the first signal in `received` instead of dying of it.

    `several` says that a launcher started this process together with others; `leave` is called before the process is
    ended, and must not wait for anything.
    """

    def __init__(self, *, several: bool = False, leave: Callable[[], None] = lambda: None) -> None:
        self.received: int | None = None
        self.several, self.leave = several, leave
        self._at = 0.0
        self._before: dict[int, Any] = {}
        self.supervised = SUPERVISED in os.environ

    def __enter__(self) -> StopSignals:
        # Python lets only the main thread have handlers; elsewhere whoever runs the thread decides.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in WATCHED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.received is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = number, now
        elif not self.supervised and not (self.several and now - self._at < ECHO_SECONDS):
            # No clean-up: it may be what hangs. Checkpoints are complete or absent in any case.
            self.leave()
            os._exit(128 + number)
