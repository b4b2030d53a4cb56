"""How fast a run is, and how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Counts images and steps by the wall clock."""

    def __init__(self, images_per_step: int) -> None:
        self.images_per_step = images_per_step
        self.start(0)

    def start(self, step: int) -> None:
        self._first_step = self._lap_step = step
        self._first_time = self._lap_time = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For work that is no part of training: no rate counts it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            away = time.perf_counter() - begin
            self._first_time, self._lap_time = self._first_time + away, self._lap_time + away

    def lap(self, step: int) -> dict[str, float]:
        """Seconds since the start, and images per second since the last lap; neither counts pauses."""
        now = time.perf_counter()
        rate = (step - self._lap_step) * self.images_per_step / max(now - self._lap_time, 1e-9)
        self._lap_step, self._lap_time = step, now
        return {"seconds": round(now - self._first_time, 3), "images_per_second": round(rate, 1)}

    def seconds_left(self, step: int, steps: int) -> float:
        done = max(step - self._first_step, 1)
        return (time.perf_counter() - self._first_time) / done * (steps - step)
