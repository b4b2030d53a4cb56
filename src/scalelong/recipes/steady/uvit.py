"""A U-ViT's blocks and their parts, which draw images in fewer calls than their modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.uvit import MLP, SHORT, Attention, Block
from .layers import Draws, SteadyLinear, has_hooks, must_be_steady, product, product_onto


class SteadyMLP(MLP):
    """Two linear layers, whose GELU oneDNN takes in passing where the first one is packed."""

    def forward(self, x: Tensor) -> Tensor:
        first, rows = self.fc1, x.numel() // x.shape[-1]
        if isinstance(first, SteadyLinear) and first.draws and rows >= first.fewest_packed and must_be_steady(x):
            return self.fc2(first.through(x, "gelu"))
        return super().forward(x)


class SteadyAttention(Attention):
    """Attention over few tokens in four calls, each of them for all heads: with few images calls take the time."""

    def mix(self, projected: Tensor) -> Tensor:
        batch, length, width = projected.shape
        if length > SHORT or not must_be_steady(projected):
            return super().mix(projected)
        heads, size = self.num_heads, width // (3 * self.num_heads)
        apart = projected.view(batch, length, 3, heads, size).permute(2, 0, 3, 1, 4)
        query, key, value = apart.reshape(3, batch * heads, length, size).unbind()
        scores = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=size**-0.5)
        mixed = torch.bmm(scores.softmax(dim=-1), value).view(batch, heads, length, size)
        return mixed.transpose(1, 2).reshape(batch, length, heads * size)


class Parts(NamedTuple):
    """What a block draws with, at hand: its modules find what they have by name, which takes 3 % of the time."""

    skip: tuple[Any, ...] | None
    norm1: tuple[Any, ...]
    qkv: tuple[Any, ...]
    mix: Callable[[Tensor], Tensor]
    proj: tuple[Any, ...]
    norm2: tuple[Any, ...]
    fc1: tuple[Any, ...]
    fc2: tuple[Any, ...]


class SteadyBlock(Draws, Block):
    """A block that draws in few calls: it computes what its modules would, and adds its input in passing."""

    fewest_rows = math.inf
    """Rows from which on it draws in few calls."""
    parts: Parts | None = None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if not self.draws or x.numel() // x.shape[-1] < self.fewest_rows or not must_be_steady(x):
            return super().forward(x, skip)
        parts = self.parts or self._gather()
        if parts.skip is not None:
            x = self.join(x, skip) if skip is None else product(torch.cat([x, skip], dim=-1), parts.skip)
        mixed = parts.mix(product(torch.layer_norm(x, *parts.norm1), parts.qkv))
        x = product_onto(x, mixed, parts.proj)
        return product_onto(x, product(torch.layer_norm(x, *parts.norm2), parts.fc1, "gelu"), parts.fc2)

    def begin_drawing(self) -> None:
        own = [module for module in self.modules() if module is not self]
        self.draws = all(is_known(module) and not has_hooks(module) for module in own)
        fewest = (module.fewest_packed for module in own if isinstance(module, SteadyLinear))
        self.fewest_rows = max(fewest, default=math.inf)

    def end_drawing(self) -> None:
        self.draws, self.parts = False, None

    def _gather(self) -> Parts:
        attention, mlp, skip = self.attn, self.mlp, self.skip_linear
        linears: Any = (attention.qkv, attention.proj, mlp.fc1, mlp.fc2)
        qkv, proj, fc1, fc2 = (linear.pack() for linear in linears)
        joint = skip.pack() if isinstance(skip, SteadyLinear) else None
        self.parts = Parts(joint, norm_of(self.norm1), qkv, attention.mix, proj, norm_of(self.norm2), fc1, fc2)
        return self.parts


def is_known(module: nn.Module) -> bool:
    if isinstance(module, SteadyLinear):
        return module.draws
    return isinstance(module, SteadyMLP | SteadyAttention) or type(module) in (nn.LayerNorm, nn.GELU)


def norm_of(layer: nn.LayerNorm) -> tuple[Any, ...]:
    return layer.normalized_shape, layer.weight, layer.bias, layer.eps
