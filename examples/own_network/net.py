"""A UNet of one's own for `kind: python`: it knows nothing of scalelong, which finds its three long skips by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions; the time is added between them."""

    def __init__(self, channels: int, out: int, time: int, groups: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm, self.time = nn.GroupNorm(groups, out), nn.Linear(time, out)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.first(x) + self.time(time)[:, :, None, None]
        return F.silu(self.second(F.silu(self.norm(x))))


class Net(nn.Module):
    """One skip per level. Shape: x (B, C, H, W), t (B,), condition (B,), labels → (B, C, H, W)."""

    def __init__(self, channels: int, widths: list[int], classes: int) -> None:
        super().__init__()
        first = widths[0]
        self.waves = first
        self.labels = nn.Embedding(classes, first) if classes else None
        self.enter, self.leave = nn.Conv2d(channels, first, 3, padding=1), nn.Conv2d(first, channels, 3, padding=1)
        pairs = list(zip([first, *widths], widths, strict=False))
        self.downs = nn.ModuleList(Block(narrow, wide, first) for narrow, wide in pairs)
        self.middle = Block(widths[-1], widths[-1], first)
        self.ups = nn.ModuleList(Block(2 * wide, narrow, first) for narrow, wide in reversed(pairs))

    def forward(self, x: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        time = sines_and_cosines(t, self.waves)
        if self.labels is not None and condition is not None:
            time = time + self.labels(condition)
        x, skips = self.enter(x), []
        for down in self.downs:
            x = down(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for up in self.ups:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1), time)
        return self.leave(x)


def sines_and_cosines(t: Tensor, width: int) -> Tensor:
    """Shape: (B,) → (B, width)."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def build(width: int = 16, depth: int = 3, channels: int = 1, classes: int = 0) -> nn.Module:
    """The factory that the recipe names; its arguments are the recipe's `options`."""
    return Net(channels, [width * 2 ** min(level, 2) for level in range(depth)], classes)
