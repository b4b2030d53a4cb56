"""Disturbances of one block or one skip of a small network that trains well otherwise, so that the culprit is known.

From step 20 on, from one step to the next: the *output* of a block, its *weights*, or the coefficient of a *skip* is
made larger and smaller by turns; or a block learns at a *rate* that is far too high.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from scalelong import scale_skips
from scalelong.diffusion import DiffusionProcess, LinearSchedule
from scalelong.models import UViT
from scalelong.monitor import SkipMonitor
from scalelong.utils.runtime import blocks_of

STEPS, CALM, BATCH, RATE = 60, 20, 16, 1e-3
CASES = 2
"""Blocks or skips for each network, disturbance and amount."""

PLANTS: dict[str, tuple[float, ...]] = {"output": (0.15, 0.5), "weights": (0.5,), "skip": (0.5, 0.9), "rate": (300,)}
"""The kinds of disturbance and how strong they are: a part of the size, or a factor of the rate."""

BLOCKS = ("in_blocks", "mid_block", "out_blocks", "down_blocks", "up_blocks")


@dataclass(frozen=True)
class Planted:
    network: str
    plant: str
    amount: float
    target: str
    named: str | None
    """The block, or for a skip its number; None if there was no diagnosis."""
    step: int | None

    @property
    def outcome(self) -> str:
        return "quiet" if self.named is None else "right" if self.named == self.target else "wrong"


def uvit(depth: int) -> nn.Module:
    return UViT(8, 4, in_chans=1, embed_dim=32, depth=depth, num_heads=2)


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        add_attention=False,
        down_block_types=("DownBlock2D",) * 3,
        up_block_types=("UpBlock2D",) * 3,
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{f"U-ViT {depth}": lambda depth=depth: uvit(depth) for depth in (6, 12, 20)},
    "UNet": unet,
}


def plant_all(seeds: Sequence[int]) -> Iterator[Planted]:
    """Disturb some blocks and skips of every network in every way."""
    for name, make in NETWORKS.items():
        chance = random.Random(name)
        for plant, amounts in PLANTS.items():
            for amount in amounts:
                for target in chance.sample(targets(make(), plant), CASES):
                    for seed in seeds:
                        found = disturbed(name, plant, amount, target, seed)
                        print(found, flush=True)
                        yield found


def targets(model: nn.Module, plant: str) -> list[str]:
    if plant == "skip":
        return [str(site.index) for site in SkipMonitor(model).sites]
    return [name for name in blocks_of(model) if name.startswith(BLOCKS)]


def disturbed(name: str, plant: str, amount: float, target: str, seed: int) -> Planted:
    """Train a network, disturb it, and see whom the diagnosis names."""
    torch.manual_seed(seed)
    model = NETWORKS[name]().train()
    disturbance = KINDS[plant](model, target, amount)
    optimizer = torch.optim.AdamW(disturbance.groups(), lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    with SkipMonitor(model, every=1, probe_every=None) as monitor:
        for step in range(STEPS):
            if step >= CALM:
                disturbance.shake(step % 2 == 0, optimizer)
            loss = loss_of(model, generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step()
    found = monitor.diagnosis()
    if found is None:
        return Planted(name, plant, amount, target, None, None)
    return Planted(name, plant, amount, target, str(found.skip) if plant == "skip" else found.block, found.step)


IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
PROCESS = DiffusionProcess(LinearSchedule(), "epsilon")


def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
    images = IMAGES[torch.randint(len(IMAGES), (BATCH,), generator=generator)]
    times, noise = PROCESS.sample_times(BATCH, generator), torch.randn(images.shape, generator=generator)
    output = model(PROCESS.add_noise(images, noise, times), PROCESS.model_time(times))
    return (getattr(output, "sample", output) - noise).square().mean()


class Output:
    """The block's output is larger and smaller by turns."""

    def __init__(self, model: nn.Module, target: str, amount: float) -> None:
        self.model, self.amount, self.factor = model, amount, 1.0
        model.get_submodule(target).register_forward_hook(self._scale)

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.model.parameters())}]

    def shake(self, larger: bool, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1 + self.amount if larger else 1 - self.amount

    def _scale(self, module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] * self.factor, *output[1:]) if isinstance(output, tuple) else output * self.factor


class Weights(Output):
    """The block's matrices are larger and smaller by turns; from the start they are large enough to matter."""

    def __init__(self, model: nn.Module, target: str, amount: float) -> None:
        self.model, self.amount = model, amount
        self.matrices = [weight for weight in model.get_submodule(target).parameters() if weight.ndim > 1]
        self._scale_all(3.0)

    def shake(self, larger: bool, optimizer: torch.optim.Optimizer) -> None:
        self._scale_all(1 + self.amount if larger else 1 / (1 + self.amount))

    @torch.no_grad()
    def _scale_all(self, factor: float) -> None:
        for weight in self.matrices:
            weight.mul_(factor)


class Rate(Output):
    """The block learns much faster than the others."""

    def __init__(self, model: nn.Module, target: str, amount: float) -> None:
        self.model, self.amount = model, amount
        self.own = {id(weight) for weight in model.get_submodule(target).parameters()}

    def groups(self) -> list[dict[str, Any]]:
        mine = [weight for weight in self.model.parameters() if id(weight) in self.own]
        return [{"params": [w for w in self.model.parameters() if id(w) not in self.own]}, {"params": mine}]

    def shake(self, larger: bool, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[1]["lr"] = RATE * self.amount


class Skip(Output):
    """The skip's coefficient is larger and smaller by turns."""

    def __init__(self, model: nn.Module, target: str, amount: float) -> None:
        self.model, self.amount, self.index = model, amount, int(target) - 1
        scale_skips(model, "uniform", value=0.7)
        self.values = model.get_buffer("skip_scaling.coefficients")
        self.calm = self.values.clone()

    def shake(self, larger: bool, optimizer: torch.optim.Optimizer) -> None:
        self.values[self.index] = self.calm[self.index] * (1 + self.amount if larger else 1 - self.amount)


KINDS: dict[str, type[Output]] = {"output": Output, "weights": Weights, "skip": Skip, "rate": Rate}
