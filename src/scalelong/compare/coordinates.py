"""The coordinate check: how much a few steps of training move what each block gives, at several widths.

In μP the change of a coordinate has one size at every width. Where it grows with the width, a rate that was tuned on a
narrow network is too large for a wide one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config, build_model, load_recipe
from ..config.build import Inputs, build_process, conditioning_of, open_inputs
from ..data import Progress
from ..models.mup import family_of
from ..training.loss import DiffusionLoss, NoisyBatch
from ..training.parallel import build_optimizer
from ..utils.runtime import blocks_of, tensors_in
from .grid import PlanError
from .intervals import CONFIDENCE, Estimate, student_quantile
from .transfer import settings_at, standard_recipe

LIMIT = 0.3
"""The steepest slope that passes: wrong scalings give halves (a sum of what is random) or ones (of what is alike)."""


@dataclass(frozen=True)
class BlockSlope:
    """One block: the rms change of its output at each width and seed, and the slope of log change over log width."""

    block: str
    widths: tuple[int, ...]
    changes: tuple[tuple[float, ...], ...]
    """For each width, one of each seed."""

    @property
    def slope(self) -> Estimate:
        return slope_of(
            [width for width, row in zip(self.widths, self.changes, strict=True) for _ in row],
            [change for row in self.changes for change in row],
        )

    @property
    def verdict(self) -> str:
        """Of "ok", "grows", "shrinks" and "unclear"."""
        slope = self.slope
        if slope.value is None or slope.low is None or slope.high is None:
            return "unclear"
        if slope.low >= -LIMIT and slope.high <= LIMIT:
            return "ok"
        return "grows" if slope.low > 0 else "shrinks" if slope.high < 0 else "unclear"


def slope_of(widths: Sequence[float], changes: Sequence[float]) -> Estimate:
    """The least-squares slope of log change over log width, with Student's interval.

    >>> slope_of([1, 2, 4, 8], [3.0, 6.0, 12.0, 24.0])
    Estimate(value=1.0, low=1.0, high=1.0)
    """
    if not all(0 < change < math.inf for change in changes):
        return Estimate(None)
    xs, ys = ([math.log(value) for value in values] for values in (widths, changes))
    middle, mean = fmean(xs), fmean(ys)
    spread = sum((x - middle) ** 2 for x in xs)
    slope = sum((x - middle) * (y - mean) for x, y in zip(xs, ys, strict=True)) / spread
    freedom = len(xs) - 2
    rest = sum((y - mean - slope * (x - middle)) ** 2 for x, y in zip(xs, ys, strict=True))
    half = student_quantile(CONFIDENCE, freedom) * math.sqrt(rest / freedom / spread)
    return Estimate(*(round(value, 12) for value in (slope, slope - half, slope + half)))


def recipes_at(recipe: str | Path, overrides: Sequence[str], widths: Sequence[int]) -> dict[int, Config]:
    """The recipe at every width; where it names no base, the smallest is."""
    model, chosen = standard_recipe(recipe, overrides).model, sorted(set(widths))
    if len(chosen) < 3:
        raise PlanError(f"--widths: a slope takes three widths or more, got {list(widths)}")
    base = model.base_width or chosen[0]
    return {at: load_recipe(recipe, [*overrides, *settings_at(recipe, overrides, base, at)]) for at in chosen}


def check_coordinates(
    configs: Mapping[int, Config], *, steps: int, seeds: int, progress: Progress | None = None
) -> list[BlockSlope]:
    """Train a few steps at every width, from several seeds, on the same batches; the blocks are in their order."""
    first, found = next(iter(configs.values())), dict[tuple[int, int], dict[str, float]]()
    inputs, cases = open_inputs(first), list(product(configs.items(), range(seeds)))
    for done, ((width, config), k) in enumerate(cases):
        if progress is not None:
            progress(done, len(cases))
        found[width, k] = changes_of(config.model_copy(update={"seed": first.seed + k}), inputs, steps)
    blocks, widths = next(iter(found.values())), tuple(configs)
    return [
        BlockSlope(block, widths, tuple(tuple(found[width, k][block] for k in range(seeds)) for width in widths))
        for block in blocks
    ]


def describe_slopes(config: Config, found: Sequence[BlockSlope], steps: int) -> dict[str, Any]:
    """coordcheck.json."""
    blocks = [{**asdict(one), "slope": asdict(one.slope), "verdict": one.verdict} for one in found]
    what = {"recipe": config.name, "parametrization": config.model.parametrization, "rate": config.optim.lr}
    return {
        **what,
        "steps": steps,
        "limit": LIMIT,
        "passed": all(one.verdict == "ok" for one in found),
        "blocks": blocks,
    }


def changes_of(config: Config, inputs: Inputs, steps: int) -> dict[str, float]:
    """The rms of the change that a few steps at the recipe's full rate make to each block's output, by the block."""
    network, size = build_model(config), config.training.batch_size
    optimizer = build_optimizer(network, config.optim, torch.device("cpu"))
    conditioning = conditioning_of(config, inputs.empty_text)
    loss = DiffusionLoss(build_process(config.diffusion), conditioning, config.seed, size, inputs.batches.own)
    batches = [loss.sample_noise(inputs.batches.at(step)) for step in range(steps)]
    before = outputs_of(network, loss, batches[0])
    for batch in batches:
        loss(network, batch).backward()
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * group["lr_factor"]
        optimizer.step()
        optimizer.zero_grad()
    after = outputs_of(network, loss, batches[0])
    return {name: (after[name] - before[name]).square().mean().sqrt().item() for name in before}


@torch.no_grad()
def outputs_of(network: nn.Module, loss: DiffusionLoss, batch: NoisyBatch) -> dict[str, Tensor]:
    """What each block gives for a batch, in the order in which they are called, up to the one that writes pixels.

    What may follow it is as large at every width, so that its change says nothing but how it was drawn.
    """
    found: dict[str, Tensor] = {}

    def read(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        found[name] = next(iter(tensors_in(output))).double()

    handles = [block.register_forward_hook(partial(read, name)) for name, block in blocks_of(network).items()]
    try:
        loss(network, batch)
    finally:
        for handle in handles:
            handle.remove()
    names = list(found)
    return {name: found[name] for name in names[: names.index(family_of(network).output) + 1]}
