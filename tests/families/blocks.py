"""Small parts shared by the stand-ins."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def waves(steps: Tensor, width: int) -> Tensor:
    """Sinusoidal embedding of a vector of steps. Shape: (B,) to (B, width)."""
    rates = torch.exp(torch.linspace(0, -4, width // 2))
    phases = steps.float()[:, None] * rates
    return torch.cat([phases.cos(), phases.sin()], dim=-1)


def over_space(vector: Tensor, like: Tensor) -> Tensor:
    """A (B, C) vector with as many trailing dimensions of size one as `like` has dimensions of space."""
    return vector.reshape(*vector.shape, *[1] * (like.dim() - vector.dim()))


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Plain attention over channel-first tokens. Shapes: (B, C, Q), (B, C, K), (B, C, K) to (B, C, Q)."""
    queries, keys, values = (tokens.transpose(1, 2) for tokens in (queries, keys, values))
    return F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)


def conv_of(dims: int) -> type[nn.Conv1d] | type[nn.Conv2d]:
    """The convolution class for one or two dimensions of space."""
    return nn.Conv1d if dims == 1 else nn.Conv2d


def root_half() -> float:
    """1/sqrt(2), the weight of each branch of a variance-preserving sum."""
    return math.sqrt(0.5)
