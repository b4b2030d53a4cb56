"""Small networks whose long skips are joined in the ways that are easily missed, or taken for others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .unknown import TokenBlock, conv_block, double, halve


def cat(*features: Tensor) -> Tensor:
    return torch.cat(features, dim=1)


class PushedTwice(nn.Module):
    """Puts each level's features twice onto its stack, since no attention comes in between; scales them by 1/√2."""

    def __init__(self, attention: bool = False, factor: float = 2**-0.5) -> None:
        super().__init__()
        self.factor, self.stem = factor, conv_block(3, 8)
        self.down = nn.ModuleList(conv_block(8, 8) for _ in range(2))
        self.attend = nn.ModuleList(conv_block(8, 8) if attention else nn.Identity() for _ in range(2))
        self.middle = conv_block(8, 8)
        self.up = nn.ModuleList(conv_block(16, 8) for _ in range(4))
        self.last, self.head = conv_block(16, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first, kept = x.clone(), []
        for down, attend in zip(self.down, self.attend, strict=True):
            x = down(x)
            kept.append(x)
            x = attend(x)
            kept.append(x)
            x = halve(x)
        x = self.middle(x)
        for i, up in enumerate(self.up):
            x = double(x) if i % 2 == 0 else x
            x = up(cat(x, kept.pop() * self.factor))
        return self.head(self.last(cat(x, first)))


class NoMiddle(nn.Module):
    """A transformer of an even number of blocks: the last one that is kept is joined at once, with itself."""

    def __init__(self, dim: int = 12, depth: int = 6, positions: int | None = 16) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, stride=4)
        self.positions = None if positions is None else nn.Parameter(torch.randn(1, positions, dim))
        self.blocks = nn.ModuleList(TokenBlock(dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(2 * dim) for _ in range(depth // 2))
        self.mix = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(depth // 2))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x if self.positions is None else x + self.positions
        kept: list[Tensor] = []
        half = len(self.blocks) // 2
        for i, block in enumerate(self.blocks):
            if i >= half:
                x = self.mix[i - half](self.norms[i - half](torch.cat([x, kept.pop()], dim=-1)))
            x = block(x)
            if i < half:
                kept.append(x)
        return self.head(x)


class BalancedCat(nn.Module):
    """One module for all joins: both parts by numbers, and their concatenation again."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        sizes = a.shape[1], b.shape[1]
        return (2 * sum(sizes)) ** 0.5 * cat(a * 0.5 / sizes[0] ** 0.5, b * 0.5 / sizes[1] ** 0.5)


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv_block(3, 8), conv_block(8, 12), conv_block(12, 12)
        self.join, self.d, self.e = BalancedCat(), conv_block(24, 8), conv_block(16, 8)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(halve(a))
        x = self.d(self.join(double(self.c(halve(b))), b))
        return self.head(self.e(self.join(double(x), a)))


class Levels(nn.Module):
    """Three levels; `join` says how each of them brings trunk and skip together, innermost first."""

    def __init__(self, *joins: str, residual: bool = False) -> None:
        super().__init__()
        self.joins, self.residual = joins, residual
        self.stem, self.down = conv_block(3, 8), nn.ModuleList(conv_block(8, 8) for _ in joins)
        self.middle, self.head = conv_block(8, 8), nn.Conv2d(8, 3, 1)
        self.up = nn.ModuleList(conv_block(16 if join == "cat" else 8, 8) for join in joins)
        self.share = nn.Parameter(torch.tensor(0.4))

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.stem(x)
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = halve(x)
        x = self.middle(x)
        for join, up in zip(self.joins, self.up, strict=True):
            x, skip = double(x), kept.pop()
            x = up(cat(x, skip) if join == "cat" else torch.lerp(skip, x, self.share) if join == "lerp" else x + skip)
        return self.head(x + first if self.residual else x)


class Mixing(nn.Module):
    """The parts of a level meet in a module of their own, in a share that is learned; channels come last."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project, self.share = nn.Linear(dim, dim), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.project(x).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        return torch.lerp(skip, x, self.share)


class ChannelsLast(nn.Module):
    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, dim), nn.Linear(dim, 3)
        self.early = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(2))
        self.middle, self.mix = nn.Sequential(nn.Linear(dim, dim), nn.GELU()), nn.ModuleList([Mixing(dim), Mixing(dim)])
        self.late = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.permute(0, 2, 3, 1))
        kept = []
        for block in self.early:
            x = block(x)
            kept.append(x)
            x = x[:, ::2, ::2]
        x = self.middle(x)
        for mix, block in zip(self.mix, self.late, strict=True):
            x = block(mix(x, kept.pop()))
        return self.head(x).permute(0, 3, 1, 2)


class NestedSkips(nn.Module):
    """UNet++: on their way to the decoder a level's features go through blocks that join those below."""

    def __init__(self, inline: bool) -> None:
        super().__init__()
        self.inline = inline
        self.x00, self.x10, self.x20 = conv_block(3, 8), conv_block(8, 8), conv_block(8, 8)
        self.x01, self.x11 = JoiningBlock(2), JoiningBlock(2)
        self.x02, self.head = JoiningBlock(3), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x00 = self.x00(x)
        x10 = self.x10(halve(x00))
        x20 = self.x20(halve(x10))
        x01 = self.joined(self.x01, x10, x00)
        x11 = self.joined(self.x11, x20, x10)
        return self.head(self.joined(self.x02, x11, x00, x01))

    def joined(self, block: JoiningBlock, x: Tensor, *skips: Tensor) -> Tensor:
        if self.inline:
            return block.conv(cat(double(x), *skips))
        return block(x, cat(*skips) if len(skips) > 1 else skips[0])


class JoiningBlock(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.conv = conv_block(8 * parts, 8)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(cat(double(x), skip))


class SideBySide(nn.Module):
    """Two UNets in one forward, with a middle of their own or the same one."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.one, self.two = nn.ModuleList(parts()), nn.ModuleList(parts())
        self.middle = nn.ModuleList([conv_block(8, 8), conv_block(8, 8)])
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for a, b, *_ in (self.one, self.two):
            first = a(x)
            levels.append((first, b(halve(first))))
        lows = [halve(second) for _, second in levels]
        if self.shared:
            lows = [sum(lows)] * 2  # type: ignore[list-item]
        outputs = []
        for low, middle, (first, second), branch in zip(lows, self.middle, levels, (self.one, self.two), strict=True):
            x = branch[2](cat(double(middle(low)), second))
            outputs.append(branch[3](cat(double(x), first)))
        return self.head(cat(*outputs))


def parts() -> list[nn.Module]:
    return [conv_block(3, 8), conv_block(8, 8), conv_block(16, 8), conv_block(16, 8)]


class Injected(nn.Module):
    """A UNet whose decoder blocks all read a tensor again: the input, or the first features."""

    def __init__(self, raw: bool) -> None:
        super().__init__()
        self.raw = raw
        extra = 3 if raw else 8
        self.a, self.b, self.c, self.m = conv_block(3, 8), conv_block(8, 8), conv_block(8, 8), conv_block(8, 8)
        self.u = nn.ModuleList(conv_block(16 + extra, 8) for _ in range(3))
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(halve(a))
        c = self.c(halve(b))
        again = [x if self.raw else a]
        again = [halve(halve(again[0])), halve(again[0]), again[0]]
        y = self.m(halve(c))
        for u, skip, other in zip(self.u, (c, b, a), again, strict=True):
            y = u(cat(double(y), skip, other))
        return self.head(y)


class AddingLevel(nn.Module):
    """A level that holds the next one and adds what it makes to its own input."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.first, self.inner, self.last = conv_block(8, 8), inner, conv_block(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.inner is None:
            return self.last(x)
        return self.last(x + double(self.inner(halve(x))))


def adding_levels() -> nn.Module:
    return nn.Sequential(conv_block(3, 8), AddingLevel(AddingLevel(AddingLevel(None))), nn.Conv2d(8, 3, 1))


class OneResidual(nn.Module):
    """A plain network between a first and a last convolution, around which one sum leads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.body = nn.Sequential(*(conv_block(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.body(x))


class Waves(nn.Module):
    """A UNet of sequences (batch, length, channels), of any length."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, dim), nn.Linear(dim, 1)
        self.early = nn.ModuleList(TokenBlock(dim) for _ in range(2))
        self.middle = TokenBlock(dim)
        self.fuse = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        kept: list[Any] = []
        for block in self.early:
            x = block(x)
            kept.append(x)
        x = self.middle(x)
        for fuse in self.fuse:
            x = fuse(torch.cat([x, kept.pop()], dim=-1))
        return self.head(x)
