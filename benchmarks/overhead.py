"""What scaling costs: the time and memory of a training step, scaled over unscaled.

    python benchmarks/overhead.py        # UViT-S/2, the 36M UNet and one that adds its skips; batch 4, 15 minutes
    python benchmarks/overhead.py --rounds 5 --models cifar10-uvit-s2 --json overhead.json

All variants run on one model object, unscaled and scaled by turns within each round (in random order), so that the
machine's noise meets all of them; the ratio of their CPU time is taken within the round, and the row `none` shows the
noise that is left.
Because a busy machine's noise is larger than what there is to measure, the work that scaling adds (coefficients and
products, forward and backward, on skips of the same shapes) is also timed alone, as a share of the unscaled step.
Goals: CS ≤ 1.01, LS ≤ 1.03.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import bootstrap_median
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from scalelong import AbsorbedScalingWarning, SkipScaling, find_skips, scale_skips, unscale_skips
from scalelong.models import example_inputs, preset

ADDING = "adding-unet"
GOALS = {"none": "–", "cs": "≤ 1.01", "ls": "≤ 1.03"}


@dataclass(frozen=True)
class Result:
    model: str
    method: str
    ratio: float
    low: float
    high: float
    added_work: float
    seconds: float
    peak_mib: float
    extra_peak_mib: float
    largest_skip_mib: float


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", AbsorbedScalingWarning)
    results = [result for name in options.models for result in measure(name, options.rounds, options.batch)]
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["cifar10-uvit-s2", "cifar10-unet", ADDING], help="presets")
    parser.add_argument("--rounds", type=int, default=20, help="paired measurements per model")
    parser.add_argument("--batch", type=int, default=4, help="images per step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args()


class AddingUNet(nn.Module):
    """The blocks and widths of `cifar10-unet`, with skips that the network's own forward adds: inline joins."""

    def __init__(self) -> None:
        super().__init__()
        unet = preset("cifar10-unet")
        self.stem, self.time, self.embed = unet.conv_in, unet.time_proj, unet.time_embedding
        self.down, self.middle = unet.down_blocks, unet.mid_block
        # Blocks of equal width on both sides, the first of a level taking over the width of the one below.
        wide = [block.resnets[0].out_channels for block in unet.down_blocks]
        kind, options = type(unet.down_blocks[0].resnets[0]), {"temb_channels": 512, "groups": 32}
        self.widen = nn.ModuleList(nn.Conv2d(w, v, 1) for w, v in zip([*wide[1:], wide[-1]], wide, strict=True))
        self.up = nn.ModuleList(nn.ModuleList(kind(in_channels=w, **options) for _ in range(3)) for w in wide)
        self.head = nn.Conv2d(wide[0], 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        x, embedded = self.stem(sample), self.embed(self.time(timestep))
        kept = []
        for block in self.down:
            x, states = block(hidden_states=x, temb=embedded)
            kept.append(states[: len(block.resnets)])
        x = self.middle(x, embedded)
        for states, widen, blocks in zip(reversed(kept), reversed(self.widen), reversed(self.up), strict=True):
            x = nn.functional.interpolate(widen(x), states[0].shape[-2:])
            for skip, block in zip(reversed(states), blocks, strict=False):
                x = block(x + skip, embedded)
        return self.head(x)


def measure(name: str, rounds: int, batch: int) -> list[Result]:
    model = AddingUNet().train() if name == ADDING else preset(name).train()
    inputs = example_inputs("cifar10-unet" if name == ADDING else name, batch)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = training_step(model, optimiser, inputs)
    scale = partial(scale_skips, model, sites=find_skips(model, inputs))
    step()  # the first one allocates the optimiser's state
    peaks = {method: peak_memory(partial(scale, method), step) for method in GOALS}
    seconds: dict[str, list[float]] = {"plain": []} | {method: [] for method in GOALS}
    for number in range(rounds):
        for method in random.sample(list(seconds), len(seconds)):
            seconds[method].append(timed(partial(scale, "none" if method == "plain" else method), step))
        print(f"\r{name}: round {number + 1} of {rounds}", end="", flush=True)
    print()
    shapes = skip_shapes(scale, step)
    widest = max(math.prod(shape) for shape in shapes.values()) * 4
    work = {method: work_alone(scale, method, shapes) for method in GOALS}
    return [summarise(name, method, seconds, peaks, widest, work[method]) for method in GOALS]


def training_step(model: nn.Module, optimiser: torch.optim.Optimizer, inputs: dict[str, Any]) -> Callable[[], None]:
    def step() -> None:
        output = model(**inputs)
        prediction = output if isinstance(output, Tensor) else output.sample
        prediction.square().mean().backward()
        optimiser.step()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def timed(scale: Callable[[], nn.Module], step: Callable[[], None]) -> float:
    scale()
    start = time.process_time()
    step()
    return time.process_time() - start


def peak_memory(scale: Callable[[], nn.Module], step: Callable[[], None]) -> float:
    """Bytes alive at the worst moment of a step, counted tensor by tensor."""
    model = scale()
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def skip_shapes(scale: Callable[[Any], nn.Module], step: Callable[[], None]) -> dict[int, torch.Size]:
    """The shape of every skip of a step, seen where it enters its consumer."""
    shapes: dict[int, torch.Size] = {}

    class Shapes(SkipScaling):
        def coefficient(self, index: int, skip: Tensor) -> Tensor:
            shapes[index] = skip.shape
            return skip.new_ones(())

    model = scale(Shapes)
    step()
    unscale_skips(model)
    return shapes


def work_alone(
    scale: Callable[[str], nn.Module], method: str, shapes: dict[int, torch.Size], repeats: int = 30
) -> float:
    """Seconds that the coefficients and products of one step take, forward and backward, at their best."""
    if method == "none":
        return 0.0
    model = scale(method)
    scaling = model.get_submodule("skip_scaling")
    total = 0.0
    for index, shape in shapes.items():
        skip, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            (skip * scaling(index, skip)).backward(gradient)
            times.append(time.perf_counter() - start)
            skip.grad = None
        total += min(times)
    unscale_skips(model)
    return total


def summarise(
    name: str, method: str, seconds: dict[str, list[float]], peaks: dict[str, float], widest: float, work: float
) -> Result:
    ratios = [scaled / plain for scaled, plain in zip(seconds[method], seconds["plain"], strict=True)]
    low, high = bootstrap_median(ratios)
    mib = 2**20
    return Result(
        model=name,
        method=method,
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        added_work=work / min(seconds["plain"]),
        seconds=statistics.median(seconds[method]),
        peak_mib=peaks[method] / mib,
        extra_peak_mib=(peaks[method] - peaks["none"]) / mib,
        largest_skip_mib=widest / mib,
    )


def table(results: list[Result]) -> str:
    head = (
        "| model | method | CPU time of a step | 95 % interval | goal | added work alone | extra peak memory "
        "| largest skip |\n"
    )
    rows = "".join(
        f"| {r.model} | {r.method} | {r.ratio:.4f}× | {r.low:.4f} – {r.high:.4f} | {GOALS[r.method]} | "
        f"{r.added_work:.2%} | {r.extra_peak_mib:.2f} MiB | {r.largest_skip_mib:.2f} MiB |\n"
        for r in results
    )
    return head + "| --- | --- | --- | --- | --- | --- | --- | --- |\n" + rows


if __name__ == "__main__":
    main()
