"""How fast sampling is: against the plain loop of a diffusers pipeline, and against the machine's own matrix products.

    python benchmarks/sample.py                                         # all cases, some minutes
    python benchmarks/sample.py --cases uvit-guided-4 --rounds 5 --steps 5
    python benchmarks/sample.py --compile                               # as `scalelong sample --compile`
    python benchmarks/sample.py --threads 1 --clock cpu --json sample.json      # on a machine that is busy

Each round samples, in random order, the same images with `Sampler.sample_batch`, which `scalelong sample` calls for
every block, and with the loop of diffusers' `DDPMPipeline`: the same network, `DDPMScheduler`, times, clipping and
noise. Guided cases go through two forwards with the plain loop, and with ours through one of both halves where that is
faster. The plain loop has a process of its own, without the memory setting of `scalelong sample`, and is never
compiled. That both sampled the same images, to one grey level, is checked first. Large square matrix products run
before, between and after them. A ratio is taken within its round, and the median over the rounds is given with its 95
% interval, so that other load on the machine meets both sides; `best` compares the fastest turns, whenever they were.
The networks are not trained: that changes the images and not the time. Nor is the time counted that it takes to
compile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import CLOCKS, Peer, serve
from torch import Tensor, nn
from train import Measure, count_operations, gemm_rate, ratio, timed
from workload import Case, recipe

from scalelong.cli import keep_freed_memory
from scalelong.config import Config, build_model, build_process
from scalelong.config.build import conditioning_of, lay_out, spread_labels
from scalelong.diffusion.guidance import Conditioning
from scalelong.diffusion.samplers import solver_indices
from scalelong.sampling.sample_run import Sampler, with_sampling

UVIT = {"kind": "uvit", "img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 8, "num_heads": 4}
UNET = {"kind": "unet", "sample_size": 32, "block_out_channels": (32, 64, 64), "depth": 1, "attention": (8,)}
GUIDANCE = 2.0
PLAIN_GOAL, GUIDED_GOAL = 1.0, 1.3

# Name → network, images in a batch, and whether they are guided by their class.
CASES: dict[str, tuple[dict[str, Any], int, bool]] = {
    f"{name}{'-guided' if guided else ''}-{batch}": (model, batch, guided)
    for name, model in (("uvit", UVIT), ("unet", UNET))
    for guided, batches in ((False, (1, 16)), (True, (1, 4, 16)))
    for batch in batches
}


@dataclass
class Times:
    """What the rounds of one case measured, in seconds, and in operations per second for the matrix products."""

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    gemm: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """One case: `operations` are those of a whole batch of images."""

    case: str
    operations: int
    images_per_second: float
    plain_images_per_second: float
    gemm_gflops: float
    measures: list[Measure]
    times: Times


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.plain is not None:
        serve_plain(options.plain, options.steps)
        return
    keep_freed_memory()
    print(f"{facts(options)}\n")
    results = [measure(name, options) for name in options.cases]
    print(table(results))
    if options.json:
        record = {**facts(options), "cases": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="what to measure")
    parser.add_argument("--rounds", type=int, default=15, help="paired measurements per case")
    parser.add_argument("--steps", type=int, default=10, help="steps of the sampler")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="time that passed, or that was computed")
    parser.add_argument("--compile", action="store_true", help="compile the network of our side")
    parser.add_argument("--plain", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args()


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    import diffusers

    return {
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "clock": options.clock,
        "sampler": "ddpm",
        "steps": options.steps,
        "compiled": options.compile,
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def measure(name: str, options: argparse.Namespace) -> Result:
    (model, batch, guided), clock = CASES[name], CLOCKS[options.clock]
    config = configure(model, batch, guided, options.steps)
    network, conditioning = lay_out(build_model(config).eval(), config.training, "cpu"), conditioning_of(config)
    sampler = Sampler(network, config, conditioning, lambda own: spread_labels(config, own.stop))
    ours, plain = lambda: sampler.sample_batch(range(batch)), plain_loop(network, config, conditioning, batch)
    operations = count_operations(ours)
    # Both must do the same work, or the ratio means nothing; inside compiled code it cannot be counted.
    assert count_operations(plain) == operations
    expected = plain()
    if options.compile:
        network.compile(dynamic=False)
    check_same_images(ours(), expected)
    command = (__file__, "--plain", name, "--steps", options.steps, "--threads", options.threads)
    with Peer(*command, clock=options.clock) as peer:
        turns = {"ours": lambda: timed(ours, clock), "plain": peer.turn}
        return summarise(name, batch, guided, operations, run_rounds(name, turns, options.rounds, clock))


def serve_plain(name: str, steps: int) -> None:
    """Be the plain loop of a case, for the process that measures."""
    model, batch, guided = CASES[name]
    config = configure(model, batch, guided, steps)
    serve(plain_loop(build_model(config).eval(), config, conditioning_of(config), batch))


def configure(model: dict[str, Any], batch: int, guided: bool, steps: int) -> Config:
    """The case as a recipe, with classes if it is guided by them."""
    plain = recipe(Case(batch, None, model, rounds=1)).model_dump()
    if guided:
        plain |= {"labels": {"classes": 10, "drop": 0.1}, "data": {**plain["data"], "label_column": "label"}}
    config = Config.model_validate(plain)
    return with_sampling(config, sampler="ddpm", steps=steps, guidance=GUIDANCE if guided else 1.0)


def plain_loop(network: nn.Module, config: Config, conditioning: Conditioning, batch: int) -> Callable[[], Tensor]:
    """The loop of a diffusers pipeline, on the times that ours visits and from the same noise."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler()
    scheduler.set_timesteps(timesteps=solver_indices(build_process(config.diffusion), config.sampling.steps))
    bound = spread_labels(config, batch)
    predictors = [conditioning.predictor(network, bound)]
    if config.labels is not None:
        free = conditioning.drop_condition(bound, torch.ones(batch, dtype=torch.bool))
        predictors.append(conditioning.predictor(network, free))

    @torch.no_grad()
    def draw() -> Tensor:
        generators = [torch.Generator().manual_seed(seed) for seed in range(batch)]
        x = torch.stack([torch.randn(config.sample_shape, generator=generator) for generator in generators])
        for t in scheduler.timesteps:
            noise, *without = (predict(x, t.expand(batch)) for predict in predictors)
            for free in without:
                noise = free + config.sampling.guidance * (noise - free)
            x = scheduler.step(noise, t, x, generator=generators).prev_sample
        return ((x / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)

    return draw


def check_same_images(ours: Tensor, plain: Tensor) -> None:
    apart = (ours.int() - plain.int()).abs().max().item()
    assert apart <= 1, f"the two sides drew other images: {apart} grey levels apart"


def run_rounds(name: str, turns: dict[str, Callable[[], float]], rounds: int, clock: Callable[[], float]) -> Times:
    times = Times()
    for turn in turns.values():
        turn()
    for number in range(rounds):
        fastest = gemm_rate(torch.float32, clock)
        for side in random.sample(list(turns), 2):
            getattr(times, side).append(turns[side]())
            fastest = max(fastest, gemm_rate(torch.float32, clock))
        times.gemm.append(fastest)
        print(f"\r{name}: round {number + 1} of {rounds}", end="", flush=True)
    print()
    return times


def summarise(name: str, batch: int, guided: bool, operations: int, times: Times) -> Result:
    rates = [operations / seconds for seconds in times.ours]
    goal = GUIDED_GOAL if guided else PLAIN_GOAL
    what = "× of two forwards in the plain loop" if guided else "× of the plain loop"
    measures = [
        ratio(what, times.plain, times.ours, min(times.plain) / min(times.ours), goal),
        ratio("of the matrix products", rates, times.gemm, max(rates) / max(times.gemm), None),
    ]
    return Result(
        case=name,
        operations=operations,
        images_per_second=batch / statistics.median(times.ours),
        plain_images_per_second=batch / statistics.median(times.plain),
        gemm_gflops=max(times.gemm) / 1e9,
        measures=measures,
        times=times,
    )


def table(results: list[Result]) -> str:
    lines = ["| case | measured | median | 95 % interval | best | goal |", "| --- | --- | --- | --- | --- | --- |"]
    for result in results:
        rates = (
            f"{result.images_per_second:.2f} images/s (plain: {result.plain_images_per_second:.2f}), "
            f"{result.operations / 1e9:.1f} GFLOP, products at up to {result.gemm_gflops:.0f} GFLOP/s"
        )
        lines += [f"| {result.case} | {rates} | | | | |", *(f"| | {row(measured)} |" for measured in result.measures)]
    return "\n".join(lines)


def row(measured: Measure) -> str:
    goal = "–" if measured.goal is None else f"≥ {measured.goal}"
    numbers = (measured.median, measured.low, measured.high, measured.best)
    median, low, high, best = (f"{number:.3f}" for number in numbers)
    return f"{measured.what} | {median} | {low} – {high} | {best} | {goal}"


if __name__ == "__main__":
    main()
