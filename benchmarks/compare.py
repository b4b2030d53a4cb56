"""How much faster a comparison is with two workers than with one: the same runs, one thread per worker.

    python benchmarks/compare.py                 # two rounds of both, some minutes
    python benchmarks/compare.py --rounds 4 --steps 200 --json compare.json

Throughput is the steps of all runs over the time from the first step that is reported to the end of the last run: the
start of Python is not part of it; evaluations, checkpoints and samples are. One worker and two take turns, in
random order within each round, and the ratio is taken within the round. Goal: two workers on two cores ≥ 1.8 times one.

On a machine that others use the clock says little. So the ratio is also given by processor time (Linux): twice the
steps per second of CPU with two workers over that with one, which is what two free cores would give.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from scalelong.compare import run
from scalelong.compare.grid import PlannedRun, make_plan
from scalelong.compare.run import Display, Progress

GOAL = 1.8


@dataclass(frozen=True)
class Speed:
    """Steps per second by the clock, and per second of the workers' processor time."""

    clock: float
    processor: float


@dataclass(frozen=True)
class Round:
    one: Speed
    two: Speed

    @property
    def ratio(self) -> float:
        return self.two.clock / self.one.clock

    @property
    def processor_ratio(self) -> float:
        return 2 * self.two.processor / self.one.processor


class Clock(Display):
    """Takes the time when training began, and when the last run ended."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.processor_first = self.processor_last = self.last = 0.0
        self.steps_then = 0

    def update(self, progress: Progress) -> None:
        if self.first is None and progress.trained:
            self.first, self.steps_then = time.perf_counter(), progress.trained
            self.processor_first = children_seconds()

    def ended(self, progress: Progress, run: PlannedRun, message: str | None) -> None:
        self.last, self.processor_last = time.perf_counter(), children_seconds()


def children_seconds() -> float:
    """Processor time so far of the server of runs, of those that have ended and of those that run; NaN if not known."""
    try:
        servers = children(os.getpid())
        ticks = sum(
            sum(ticks_of(server)) + sum(sum(ticks_of(job)[:2]) for job in children(server)) for server in servers
        )
    except OSError:
        return math.nan
    return ticks / os.sysconf("SC_CLK_TCK")


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def ticks_of(process: int) -> list[int]:
    """User and system time of a process, and of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return [int(field) for field in fields[11:15]]


def main() -> None:
    options = parse()
    # Every worker gets one thread, also where one worker could have two.
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds = []
    for number in range(options.rounds):
        speeds = {count: measure(count, options) for count in random.sample([1, 2], 2)}
        rounds.append(Round(speeds[1], speeds[2]))
        print(f"round {number + 1}: 1 worker {speeds[1].clock:.1f}, 2 workers {speeds[2].clock:.1f} steps/s, ", end="")
        print(f"ratio {rounds[-1].ratio:.2f}, by processor time {rounds[-1].processor_ratio:.2f}", flush=True)
    middle, steady = (
        statistics.median(kind) for kind in zip(*((one.ratio, one.processor_ratio) for one in rounds), strict=True)
    )
    print(f"median ratio {middle:.2f}, by processor time {steady:.2f}, over {len(rounds)} rounds; goal {GOAL}")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in rounds], indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="paired measurements")
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--runs", type=int, default=4, help="seeds of the one method that is run")
    parser.add_argument("--recipe", default="digits")
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args()


def measure(workers: int, options: argparse.Namespace) -> Speed:
    """The speed of a whole comparison."""
    plan = make_plan(options.recipe, ["none"], seeds=options.runs, overrides=[f"training.steps={options.steps}"])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        result = run.compare(plan, folder, workers=workers, display=clock)
    if result.failures or clock.first is None:
        raise SystemExit(f"the runs failed: {result.failures}")
    steps = options.steps * options.runs - clock.steps_then
    return Speed(steps / (clock.last - clock.first), steps / (clock.processor_last - clock.processor_first))


if __name__ == "__main__":
    main()
