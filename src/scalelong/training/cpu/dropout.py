"""Dropout from fewer random bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEVELS = 2**16


class QuickDropout(nn.Dropout):
    """Dropout that draws 16 random bits for each number, four at a time, where torch takes eight times as long.

    The share that is kept is the nearest multiple of 2⁻¹⁶, and what is kept is divided by exactly that share.
    """

    def forward(self, input: Tensor) -> Tensor:
        kept = round((1 - self.p) * LEVELS)
        if not self.training or self.inplace or kept in (0, LEVELS) or torch.compiler.is_compiling():
            return super().forward(input)
        bits = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        levels = bits.view(torch.int16)[: input.numel()].view(input.shape)
        return input * factors(levels, kept - LEVELS // 2, LEVELS / kept).to(input.dtype)


def factors(levels: Tensor, limit: int, scale: float) -> Tensor:
    """`scale` for levels below the limit, and 0 for others: whole numbers, so that a steep line between them is exact.

    torch writes truth values one by one, and reads them so, which takes four times as long.

    >>> factors(torch.tensor([-7, 2, 3, 9], dtype=torch.int16), 3, 1.25)
    tensor([1.2500, 1.2500, 0.0000, 0.0000])
    """
    slope = 4 * scale
    line = levels.to(torch.float32)
    return torch.sub(torch.tensor(slope * (limit - 0.5)), line, alpha=slope, out=line).clamp_(0, scale)
