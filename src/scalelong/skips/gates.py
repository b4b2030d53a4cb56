"""The small networks of learned scaling: they read a pooled skip and give its coefficients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "elu": F.elu, "mish": F.mish}


class Linear32(nn.Linear):
    """A Linear that computes in float32 whatever the precision of its weights."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.float(), self.bias.float())


class Gate(nn.Module, ABC):
    """The calibration network ζ of learned scaling: pooled skip (B, W) in, coefficients in (0, 1) of that shape out.

    It computes in float32 whatever the model's precision: a pooled value in half precision can overflow, and a
    coefficient near 0 or 1 would be rounded away.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @abstractmethod
    def logits(self, pooled: Tensor) -> Tensor:
        """The coefficients before the sigmoid, in float32."""

    def forward(self, pooled: Tensor) -> Tensor:
        if pooled.shape[1] != self.width:
            raise ValueError(
                f"this gate weighs {self.width} positions but the skip has {pooled.shape[1]}: the resolution changed. "
                'Use scale_skips(..., "ls", gate="channels"), which does not depend on it.'
            )
        with nullcontext() if pooled.is_meta else torch.autocast(pooled.device.type, enabled=False):
            return torch.sigmoid(self.logits(pooled))


class SqueezeExcite(Gate):
    """The squeeze-and-excitation MLP W → W/ratio → W of Eq. 9."""

    def __init__(self, width: int, ratio: int, activation: str, init: float | None) -> None:
        super().__init__(width)
        hidden = max(width // ratio, 1)
        self.activation = activation
        self.squeeze = Linear32(width, hidden)
        self.excite = Linear32(hidden, width)
        if init is not None:
            nn.init.zeros_(self.excite.weight)
            nn.init.constant_(self.excite.bias, logit(init))

    def logits(self, pooled: Tensor) -> Tensor:
        return self.excite(ACTIVATIONS[self.activation](self.squeeze(pooled)))


class InstanceEnhance(Gate):
    """A scale and a shift for each position of the pooled skip."""

    def __init__(self, width: int, init: float | None) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.full((width,), 0.0 if init is None else logit(init)))

    def logits(self, pooled: Tensor) -> Tensor:
        return pooled * self.scale.float() + self.shift.float()


def logit(share: float) -> float:
    return math.log(share / (1 - share))
