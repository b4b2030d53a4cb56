"""What the monitor costs: the CPU time of a training step that it reads, over one that it does not.

    python benchmarks/monitor.py        # UViT-S/2 and the 36M UNet at batch 4, some minutes
    python benchmarks/monitor.py --rounds 5 --models cifar10-uvit-s2 --json monitor.json

Plain, read and probed steps are made by turns, in random order within each round, on one model; the extra time is
taken within the round. The overhead at the default intervals is extra(read)/every + extra(probe)/probe_every: between
readings the model carries no hooks. A small batch is the worst case, since the copy of the weights does not grow with
it. Goal: ≤ 3 % of a step.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import bootstrap_median
from torch import Tensor, nn

from scalelong.models import example_inputs, preset
from scalelong.monitor import SkipMonitor

GOAL = 0.03
DEFAULTS = {name: inspect.signature(SkipMonitor).parameters[name].default for name in ("every", "probe_every")}
VARIANTS = ("plain", "read", "probed")


@dataclass(frozen=True)
class Result:
    model: str
    batch: int
    step_seconds: float
    read_extra: float
    probe_extra: float
    overhead: float
    low: float
    high: float


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    results = [measure(name, options.rounds, options.batch) for name in options.models]
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["cifar10-uvit-s2", "cifar10-unet"], help="presets to measure")
    parser.add_argument("--rounds", type=int, default=10, help="paired measurements per model")
    parser.add_argument("--batch", type=int, default=4, help="images per step")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args()


def measure(name: str, rounds: int, batch: int) -> Result:
    model = preset(name).train()
    optimizer, inputs = torch.optim.AdamW(model.parameters(), lr=1e-4), example_inputs(name, batch)
    train_step(model, optimizer, inputs)  # The first one allocates the optimiser's state.
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        for variant in random.sample(VARIANTS, len(VARIANTS)):
            seconds[variant].append(timed(variant, model, optimizer, inputs))
        print(f"\r{name}: round {number + 1} of {rounds}", end="", flush=True)
        print(f"  {summarise(name, batch, seconds).overhead:.2%}", end="", flush=True)
    print()
    return summarise(name, batch, seconds)


def timed(variant: str, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> float:
    """CPU seconds of one step; everything the monitor does for a step is inside."""
    if variant == "plain":
        start = time.process_time()
        train_step(model, optimizer, inputs)
        return time.process_time() - start
    monitor = SkipMonitor(model, every=1, probe_every=1 if variant == "probed" else None)
    start = time.process_time()
    monitor.start()
    train_step(model, optimizer, inputs)
    monitor.step()
    _ = monitor.latest
    monitor.stop()
    return time.process_time() - start


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> None:
    output = model(**inputs)
    (output if isinstance(output, Tensor) else output.sample).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def summarise(name: str, batch: int, seconds: dict[str, list[float]]) -> Result:
    rounds = list(zip(*(seconds[variant] for variant in VARIANTS), strict=True))
    read = [(read - plain) / plain for plain, read, _ in rounds]
    probe = [(probed - read) / plain for plain, read, probed in rounds]
    shares = [r / DEFAULTS["every"] + p / DEFAULTS["probe_every"] for r, p in zip(read, probe, strict=True)]
    middle = statistics.median
    low, high = bootstrap_median(shares)
    return Result(name, batch, middle(seconds["plain"]), middle(read), middle(probe), middle(shares), low, high)


def table(results: list[Result]) -> str:
    head = "| model | batch | step | a read step | a probe | at the defaults | 95 % interval | goal |\n"
    rows = "".join(
        f"| {r.model} | {r.batch} | {r.step_seconds:.2f} s | {r.read_extra:+.1%} | {r.probe_extra:+.1%} | "
        f"{r.overhead:.2%} | {r.low:.2%} – {r.high:.2%} | ≤ {GOAL:.0%} |\n"
        for r in results
    )
    return f"{head}| --- | --- | --- | --- | --- | --- | --- | --- |\n{rows}"


if __name__ == "__main__":
    main()
