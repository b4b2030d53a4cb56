"""Small networks for the monitor's tests, steps of training, and what a skip is at the place where it is joined."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scalelong import scale_skips
from scalelong.models import UViT
from scalelong.monitor import SkipMonitor


def uvit(**options: Any) -> UViT:
    return UViT(8, 4, embed_dim=32, depth=4, num_heads=2, **options)


def unet(**options: Any) -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
        **options,
    )


NETWORKS: dict[str, Callable[..., nn.Module]] = {"uvit": uvit, "unet": unet}


def batch(seed: int, size: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images, noise = torch.randn(2, size, 3, 8, 8, generator=generator)
    return images, torch.rand(size, generator=generator) * 999, noise


def loss_of(model: nn.Module, seed: int) -> Tensor:
    images, times, noise = batch(seed)
    output = model(images, times)
    return ((output if isinstance(output, Tensor) else output.sample) - noise).square().mean()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, seed)
    loss.backward()
    optimizer.step()
    return loss.item()


@dataclass
class Joins(TorchFunctionMode):
    """Sees every concatenation of two feature maps: the trunk and the skip, innermost first, with their gradients."""

    trunks: list[Tensor] = field(default_factory=list)
    skips: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat and len(args[0]) == 2 and self._is_join(args[0][0], kwargs.get("dim", args[1:])):
            trunk, skip = (part.view_as(part) for part in args[0])
            self.trunks.append(trunk)
            self.skips.append(skip)
            if skip.requires_grad:
                skip.retain_grad()
            args = ([trunk, skip], *args[1:])
        return func(*args, **kwargs)

    def _is_join(self, trunk: Tensor, dim: Any) -> bool:
        return (trunk.ndim, dim) in ((3, -1), (4, 1))

    def of(self, index: int) -> tuple[Tensor, Tensor]:
        """Trunk and skip of skip `index`, 1 = outermost."""
        return self.trunks[-index], self.skips[-index]


def scaled(kind: str, method: str, **options: object) -> nn.Module:
    model = NETWORKS[kind](**options).train()
    return scale_skips(model, method)


def read_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, probe: int | None = None) -> dict[str, float]:
    with SkipMonitor(model, every=1, probe_every=probe) as monitor:
        train_step(model, optimizer, seed=0)
        assert monitor.step()
    (reading,) = monitor.readings()
    return reading


def skips_of(reading: dict[str, float]) -> list[int]:
    return [int(name[4:-8]) for name in reading if re.fullmatch(r"skip\d+/feature", name)]


def blocks_in(reading: dict[str, float]) -> list[str]:
    return [name[6:-8] for name in reading if re.fullmatch("block/.*/feature", name)]


def number(tensor: Tensor) -> float:
    return tensor.detach().float().item()


def per_image(features: Tensor) -> float:
    return number(features.detach().norm() / math.sqrt(len(features)))
