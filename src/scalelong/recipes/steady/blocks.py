"""A U-ViT's blocks and their parts, which draw images in fewer calls than their modules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...models.uvit import MLP, SHORT, Attention, Block
from .layers import Draws, SteadyLinear, has_hooks, must_be_steady


class SteadyMLP(MLP):
    """Two linear layers, whose GELU oneDNN takes in passing where the first one is packed."""

    def forward(self, x: Tensor) -> Tensor:
        first, rows = self.fc1, x.numel() // x.shape[-1]
        if isinstance(first, SteadyLinear) and first.draws and rows >= first.fewest_packed and must_be_steady(x):
            return self.fc2(first.through(x, "gelu"))
        return super().forward(x)


class SteadyAttention(Attention):
    """Attention over few tokens in four calls, each of them for all heads: with few images calls take the time."""

    def attend(self, heads: Tensor) -> Tensor:
        if heads.shape[-2] > SHORT or not must_be_steady(heads):
            return super().attend(heads)
        query, key, value = heads.flatten(1, 2).unbind()
        scores = torch.baddbmm(heads.new_empty(()), query, key.mT, beta=0, alpha=heads.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(dim=-1), value).view(heads.shape[1:])


class SteadyBlock(Draws, Block):
    """A block that draws in few calls: it computes what its modules would, and adds its input in passing."""

    fewest_rows = math.inf
    """Rows from which on it draws in few calls."""

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if not self.draws or x.numel() // x.shape[-1] < self.fewest_rows or not must_be_steady(x):
            return super().forward(x, skip)
        attention: Any = self.attn
        mlp: Any = self.mlp
        x = self.join(x, skip)
        x = attention.proj.onto(x, attention.mix(attention.qkv.through(normed(x, self.norm1))))
        return mlp.fc2.onto(x, mlp.fc1.through(normed(x, self.norm2), "gelu"))

    def begin_drawing(self) -> None:
        own = [module for module in self.modules() if module is not self]
        self.draws = all(is_known(module) and not has_hooks(module) for module in own)
        if self.draws:
            self.fewest_rows = max(module.fewest_packed for module in own if isinstance(module, SteadyLinear))


def is_known(module: nn.Module) -> bool:
    if isinstance(module, SteadyLinear):
        return module.draws
    return isinstance(module, SteadyMLP | SteadyAttention) or type(module) in (nn.LayerNorm, nn.GELU)


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return torch.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
