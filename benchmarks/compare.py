"""How much faster a comparison is with two workers than with one: the same runs, one thread per worker.

    python benchmarks/compare.py                 # two rounds of both, some minutes
    python benchmarks/compare.py --rounds 4 --steps 200 --json compare.json

Throughput is the steps of all runs over the time from the first step that is reported to the end of the last run: the
start of Python is not part of it, and evaluations, checkpoints and samples are. One worker and two take turns, in
random order within each round, and the ratio is taken within the round. Goal: two workers on two cores ≥ 1.8 times one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from scalelong.comparison import runner
from scalelong.comparison.board import Board, Watcher
from scalelong.comparison.plan import PlannedRun, make_plan

GOAL = 1.8


@dataclass(frozen=True)
class Round:
    one: float
    """Steps per second with one worker."""
    two: float

    @property
    def ratio(self) -> float:
        return self.two / self.one


class Clock(Watcher):
    """Notes when training began in every worker, and when the last run ended."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.steps_then = 0
        self.last = 0.0

    def update(self, board: Board) -> None:
        if self.first is None and board.trained:
            self.first, self.steps_then = time.perf_counter(), board.trained

    def ended(self, board: Board, run: PlannedRun, message: str | None) -> None:
        self.last = time.perf_counter()


def main() -> None:
    options = parse()
    # Every worker gets one thread, also where one worker could have two.
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds = []
    for number in range(options.rounds):
        speeds = {count: throughput(count, options) for count in random.sample([1, 2], 2)}
        rounds.append(Round(speeds[1], speeds[2]))
        print(f"round {number + 1}: 1 worker {speeds[1]:.1f}, 2 workers {speeds[2]:.1f} steps/s, ", end="")
        print(f"ratio {rounds[-1].ratio:.2f}", flush=True)
    middle = statistics.median(one.ratio for one in rounds)
    print(f"median ratio {middle:.2f} over {len(rounds)} rounds; goal {GOAL}")
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


def throughput(workers: int, options: argparse.Namespace) -> float:
    """Steps per second of a whole comparison."""
    plan = make_plan(options.recipe, ["none"], seeds=options.runs, overrides=[f"training.steps={options.steps}"])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        ending = runner.compare(plan, folder, workers=workers, watcher=clock)
    if ending.failures or clock.first is None:
        raise SystemExit(f"the runs failed: {ending.failures}")
    return (options.steps * options.runs - clock.steps_then) / (clock.last - clock.first)


if __name__ == "__main__":
    main()
