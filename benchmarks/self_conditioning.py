"""What self-conditioning costs: the CPU time of a training step, conditioned over plain, and the work that it adds.

    python benchmarks/self_conditioning.py     # UViT-S/2 and the 36M UNet at batch 4, a few minutes

Plain, plain again and conditioned take turns on one model object, in random order within each round; the ratio is taken
within the round, and the row `plain` shows the noise that is left. The work alone (mean, MLP and sums, forward and
backward on features of the same shape, and AdamW on the MLP) is timed by itself, as a share of the plain step. Goal:
≤ 1.02.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from common import bootstrap_median
from overhead import training_step
from torch import Tensor, nn

from scalelong import condition_on_self, uncondition_on_self
from scalelong.models import example_inputs, preset
from scalelong.skips.self_conditioning import SelfConditioning, find_bottleneck


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["cifar10-uvit-s2", "cifar10-unet"], help="presets")
    parser.add_argument("--rounds", type=int, default=20, help="paired measurements per model")
    parser.add_argument("--batch", type=int, default=4, help="images per step")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("| model | step | CPU time of a step | 95 % interval | added work alone | parameters added |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.models:
        measure(name, options.rounds, options.batch)


def measure(name: str, rounds: int, batch: int) -> None:
    model = preset(name).train()
    step = training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), example_inputs(name, batch))
    step()  # the first one allocates the optimiser's state
    variants = {"base": uncondition_on_self, "plain": uncondition_on_self, "conditioned": condition_on_self}
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant in random.sample(list(variants), len(variants)):
            variants[variant](model)
            seconds[variant].append(cpu_time(step))
    share = work_alone(model, step) / min(seconds["base"])
    plain, added = count(uncondition_on_self(model)), count(condition_on_self(model))
    for variant in ("plain", "conditioned"):
        ratios = [one / base for one, base in zip(seconds[variant], seconds["base"], strict=True)]
        low, high = bootstrap_median(ratios)
        extra = f"{share:.2%} | {added / plain - 1:.2%}" if variant == "conditioned" else "– | –"
        print(
            f"| {name} | {variant} | {statistics.median(ratios):.4f}× | {low:.4f} – {high:.4f} | {extra} |", flush=True
        )


def work_alone(model: nn.Module, step: Callable[[], None], repeats: int = 30) -> float:
    """Seconds that a step takes for what is added, at their best."""
    found, shapes = find_bottleneck(model), []
    handle = found.middle.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    step()
    handle.remove()
    features = torch.randn(shapes[0], requires_grad=True)
    module = SelfConditioning(found.width, found.guide)
    nn.init.normal_(module.last.weight)
    optimiser = torch.optim.AdamW(module.parameters())
    guided = shapes[0] if found.has_tokens else (shapes[0][0], found.guide)
    places = [torch.randn(guided, requires_grad=True) for _ in found.decoder]

    def work() -> None:
        guide: Tensor = module(features)
        sums = [place + (guide.unsqueeze(1) if found.has_tokens else guide) for place in places]
        torch.autograd.backward(sums, [torch.ones_like(total) for total in sums])
        optimiser.step()
        for tensor in (features, *places, *module.parameters()):
            tensor.grad = None

    return min(cpu_time(work) for _ in range(repeats))


def cpu_time(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
