"""What the benchmarks share."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def bootstrap_median(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """A 95 % interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""The time that passed, or that the process computed."""


class Peer:
    """A loop to be compared with, in a process of its own that waits while ours is timed; it calls `serve`."""

    def __init__(self, *command: Any, clock: str) -> None:
        arguments = [sys.executable, *map(str, command)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.column = list(CLOCKS).index(clock)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()

    def turn(self) -> float:
        """The seconds of one turn."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline().split()[self.column])


def serve(turn: Callable[[], Any]) -> None:
    """Take a turn for every line of the standard input, and answer with its seconds by every clock."""
    for _ in sys.stdin:
        starts = [clock() for clock in CLOCKS.values()]
        turn()
        print(*(clock() - start for clock, start in zip(CLOCKS.values(), starts, strict=True)), flush=True)
