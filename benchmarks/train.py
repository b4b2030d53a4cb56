"""How fast the trainer is: its step against a plain PyTorch loop and against the machine's own matrix products.

    python benchmarks/train.py                       # all models and the memory of 2,000 steps, about half an hour
    python benchmarks/train.py --models uvit-tiny --rounds 5
    python benchmarks/train.py --threads 1 --clock cpu --json train.json      # on a machine that is busy
    python benchmarks/train.py --precision fp32                               # as the plain loop has it
    python benchmarks/train.py --models unet-36m --with channels_last         # the plain loop stays as it is
    python benchmarks/train.py --models none --memory-steps 500

Each round runs, in random order, `Trainer.train_step` (batches, noise, finiteness check, clipping, fused AdamW, EMA
weights) and one of the loop that most people write: the same network, batch size and clipping, a DataLoader over images
in memory, float32, AdamW without fused or foreach kernels, and an average that goes parameter by parameter. The trainer
runs in the precision that it chooses by itself (bf16 where the processor has it), or in that of `--precision`, and with
the memory setting of `scalelong train`; the plain loop has a process of its own, without it. Large square matrix
products, in float32 and in bf16, run before, between and after them. A ratio is taken within its round and the median
over the rounds is given with its 95 % interval, so that other load on the machine meets both sides; `best` compares the
fastest step of each with the fastest matrix product, whenever they were. The operations of a step are those of forward
and backward as torch counts them, the attention's backward as twice its forward (nothing for what it computes again).

`--clock cpu` counts the time that the process computed instead of the time that passed: use it with `--threads 1`, for
threads that wait for each other count as computing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import CLOCKS, Peer, bootstrap_median
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop
from workload import CASES, Case, plain_loop, recipe

from scalelong.cli import keep_freed_memory
from scalelong.runs import Run
from scalelong.runs.run_dir import ResumePoint
from scalelong.training import Display, Trainer, train
from scalelong.training.parallel import Parallel
from scalelong.utils.runtime import best_device, resolve_precision

SPEEDUP_GOAL, WAIT_GOAL, GROWTH_GOAL = 1.1, 0.02, 0.01
SWITCHES = ("channels_last", "compile")
GEMM_SIDE = 2048


@dataclass
class Times:
    """What the rounds of one model measured, in seconds, and in operations per second for the matrix products."""

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    gemm: list[float] = field(default_factory=list)
    gemm_bf16: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Measure:
    """A median with its 95 % interval, the same of the best times, and the goal."""

    what: str
    median: float
    low: float
    high: float
    best: float
    goal: float | None = None


@dataclass(frozen=True)
class Result:
    """One model: `operations` are those of a step, like `images_per_second` ours."""

    model: str
    batch: int
    precision: str
    parameters: int
    operations: int
    rounds: int
    images_per_second: float
    plain_images_per_second: float
    gemm_gflops: float
    gemm_bf16_gflops: float
    measures: list[Measure]
    times: Times


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    print(f"{facts(options)}\n")
    names = [name for name in options.models if name != "none"]
    # First: what larger networks leave behind would hide a leak.
    memory = measure_memory(options.memory_steps) if options.memory_steps else None
    results = [measure(name, options) for name in names]
    print(table(results, memory))
    if options.json:
        record = {**facts(options), "models": [asdict(result) for result in results], "memory": memory}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=[*CASES, "none"], help="what to measure")
    parser.add_argument("--rounds", type=int, help="paired measurements per model, instead of its own number")
    parser.add_argument("--batch", type=int, help="images per step, instead of the model's own number")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16"), default="auto", help="the trainer's; the plain loop has fp32"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="time that passed, or that was computed")
    parser.add_argument(
        "--with", dest="switches", nargs="+", default=[], choices=SWITCHES, help="options of the trainer to turn on"
    )
    parser.add_argument("--memory-steps", type=int, default=2000, help="steps to watch the memory of; 0 = do not")
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args()


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "clock": options.clock,
        "trainer's precision": resolve_precision(options.precision, best_device()),
        "trainer's options": options.switches,
        "load": load,
    }


def measure(name: str, options: argparse.Namespace) -> Result:
    case, switches = CASES[name], options.switches
    case = replace(case, batch=options.batch or case.batch, rounds=options.rounds or case.rounds)
    with tempfile.TemporaryDirectory() as folder:
        config = recipe(case, precision=options.precision, **dict.fromkeys(switches, True))
        trainer = Trainer(config, Run(Path(folder)), ResumePoint(), Parallel.open(config.training))
        operations = count_operations(plain_loop(trainer.config))
        # Both must do the same work, or the ratio means nothing; inside compiled code it cannot be counted.
        if "compile" not in switches:
            assert count_operations(trainer.train_step) == operations
        workload = Path(__file__).with_name("workload.py")
        with Peer(workload, name, case.batch, options.threads, clock=options.clock) as plain:
            times = run_rounds(name, trainer, plain, case.rounds, CLOCKS[options.clock])
    parameters = sum(parameter.numel() for parameter in trainer.parameters)
    precision = trainer.parallel.precision
    return summarise(name, case, precision, parameters, operations, times)


def count_operations(step: Callable[[], Any]) -> int:
    """Multiplications and additions of the matrix products, convolutions and attention of a step."""

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return 2 * sdpa_flop(query, key, value)

    forward = lambda query, key, value, *_, **__: sdpa_flop(query, key, value)  # noqa: E731
    # Of these torch counts the kernels of GPUs only.
    kernels = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        step()
    return counter.get_total_flops()


def run_rounds(name: str, trainer: Trainer, plain: Peer, rounds: int, clock: Callable[[], float]) -> Times:
    times, waits = Times(), watch_batches(trainer, clock)
    steps = {"ours": lambda: timed(trainer.train_step, clock), "plain": plain.turn}
    for step in steps.values():
        step()
    for number in range(rounds):
        waits.clear()
        rates = [gemm_rates(clock)]
        for side in random.sample(list(steps), 2):
            getattr(times, side).append(steps[side]())
            rates.append(gemm_rates(clock))
        single, half = (max(found) for found in zip(*rates, strict=True))
        times.gemm.append(single)
        times.gemm_bf16.append(half)
        times.waits.append(sum(waits))
        print(f"\r{name}: round {number + 1} of {rounds}", end="", flush=True)
    print()
    return times


def watch_batches(trainer: Trainer, clock: Callable[[], float]) -> list[float]:
    """A list that gets the time of every batch the trainer asks for."""
    waits, fetch = [], trainer.batches.at

    def at(step: int) -> Any:
        start = clock()
        batch = fetch(step)
        waits.append(clock() - start)
        return batch

    trainer.batches.at = at
    return waits


def timed(step: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start


def gemm_rates(clock: Callable[[], float]) -> tuple[float, float]:
    """The better of two products of square matrices, in operations per second: of float32, and of bf16."""
    return gemm_rate(torch.float32, clock), gemm_rate(torch.bfloat16, clock)


def gemm_rate(dtype: torch.dtype, clock: Callable[[], float]) -> float:
    left, right, product = matrices(dtype)
    seconds = min(timed(lambda: torch.mm(left, right, out=product), clock) for _ in range(2))
    return 2 * GEMM_SIDE**3 / seconds


@cache
def matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two factors, and room for their product."""
    left, right = (torch.randn(GEMM_SIDE, GEMM_SIDE).to(dtype) for _ in range(2))
    return left, right, torch.empty_like(left)


def summarise(name: str, case: Case, precision: str, parameters: int, operations: int, times: Times) -> Result:
    rates = [operations / seconds for seconds in times.ours]
    best = operations / min(times.ours)
    measures = [
        ratio("× of the plain loop", times.plain, times.ours, min(times.plain) / min(times.ours), SPEEDUP_GOAL),
        ratio("of the products in fp32", rates, times.gemm, best / max(times.gemm), case.peak_goal),
        ratio("of the products in bf16", rates, times.gemm_bf16, best / max(times.gemm_bf16), None),
        ratio("of a step waiting for data", times.waits, times.ours, min(times.waits) / min(times.ours), WAIT_GOAL),
    ]
    return Result(
        model=name,
        batch=case.batch,
        precision=precision,
        parameters=parameters,
        operations=operations,
        rounds=len(times.ours),
        images_per_second=case.batch / statistics.median(times.ours),
        plain_images_per_second=case.batch / statistics.median(times.plain),
        gemm_gflops=max(times.gemm) / 1e9,
        gemm_bf16_gflops=max(times.gemm_bf16) / 1e9,
        measures=measures,
        times=times,
    )


def ratio(what: str, over: list[float], under: list[float], best: float, goal: float | None) -> Measure:
    """The median of the rounds' ratios."""
    ratios = [first / second for first, second in zip(over, under, strict=True)]
    return Measure(what, statistics.median(ratios), *bootstrap_median(ratios), best, goal)


class Watch(Display):
    """Notes the process's memory at every step of a run, and says nothing else."""

    def __init__(self) -> None:
        self.mib: list[float] = []
        self.steps = 0

    def start(self, step: int, steps: int) -> None:
        self.steps = steps

    def step(self, step: int, loss: float) -> None:
        self.mib.append(resident_mib())
        if step % 100 == 0:
            print(f"\rmemory: step {step} of {self.steps}", end="", flush=True)


def measure_memory(steps: int) -> dict[str, Any]:
    """How much a whole run of a very small network grows from a quarter of its steps to the end.

    Everything that a run does is in it: logging, validation losses, samples and checkpoints.
    """
    model = {"kind": "uvit", "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    watch, often = Watch(), max(1, steps // 16)
    config = recipe(
        Case(8, None, model, 1), steps=steps, validate_every=often, sample_every=often, checkpoint_every=often
    )
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        train(config, folder, display=watch)
    print()
    quarter = len(watch.mib) // 4
    begin, end = statistics.median(watch.mib[quarter : 2 * quarter]), statistics.median(watch.mib[-quarter:])
    return {"steps": steps, "begin_mib": begin, "end_mib": end, "growth": end / begin - 1, "goal": GROWTH_GOAL}


def resident_mib() -> float:
    """Memory that the process occupies; the kernel of Linux says so."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def table(results: list[Result], memory: dict[str, Any] | None) -> str:
    lines = ["| model | measured | median | 95 % interval | best | goal |", "| --- | --- | --- | --- | --- | --- |"]
    for result in results:
        model = f"{result.model}, {result.parameters / 1e6:.1f}M, batch {result.batch}, {result.precision}"
        rates = (
            f"{result.images_per_second:.2f} images/s (plain: {result.plain_images_per_second:.2f}), "
            f"{result.operations / 1e9:.0f} GFLOP per step, "
            f"products at up to {result.gemm_gflops:.0f} GFLOP/s (bf16: {result.gemm_bf16_gflops:.0f})"
        )
        lines += [f"| {model} | {rates} | | | | |", *(f"| | {row(measured)} |" for measured in result.measures)]
    if memory is not None:
        span = f"{memory['begin_mib']:.1f} → {memory['end_mib']:.1f} MiB"
        lines.append(f"| memory over {memory['steps']} steps | growth | {memory['growth']:.2%} | {span} | | ≤ 1 % |")
    return "\n".join(lines)


def row(measured: Measure) -> str:
    sign = "≤" if measured.goal == WAIT_GOAL else "≥"
    goal = "–" if measured.goal is None else f"{sign} {measured.goal}"
    numbers = (measured.median, measured.low, measured.high, measured.best)
    median, low, high, best = (f"{number:.3f}" for number in numbers)
    return f"{measured.what} | {median} | {low} – {high} | {best} | {goal}"


if __name__ == "__main__":
    main()
