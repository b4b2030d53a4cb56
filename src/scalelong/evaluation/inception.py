"""The Inception v3 of the FID, in plain torch: it loads the weights file of pytorch-fid, and needs no torchvision.

It is the network of Szegedy et al. (2015) as TensorFlow's release of 2015-12-05 has it. It differs from the later ones
in its pooling: averages leave out the padding, and the last block takes a maximum where the others take an average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 2048

# A convolution: channels out, kernel, stride, padding.
Convolution = tuple[int, tuple[int, int], int, tuple[int, int]]
# What a block joins: each branch is a chain of convolutions; a tuple in it is a fork, whose ends are joined.
Branch = Sequence["str | tuple[str, ...]"]

AVERAGE, MAXIMUM, SHRINK = "average", "maximum", "shrink"


class ConvNorm(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, channels: int, made: Convolution) -> None:
        super().__init__()
        out, kernel, stride, padding = made
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Mixed(nn.Module):
    """Branches side by side, joined along the channels."""

    def __init__(self, channels: int, branches: Sequence[Branch], made: Mapping[str, Convolution]) -> None:
        super().__init__()
        self.branches = branches
        for branch in branches:
            width = channels
            for part in branch:
                names = (part,) if isinstance(part, str) else part
                for name in [name for name in names if name in made]:
                    self.add_module(name, ConvNorm(width, made[name]))
                width = sum(made[name][0] for name in names) if names[0] in made else width

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._follow(branch, x) for branch in self.branches], 1)

    def _follow(self, branch: Branch, x: Tensor) -> Tensor:
        for part in branch:
            if isinstance(part, tuple):
                x = torch.cat([self.get_submodule(name)(x) for name in part], 1)
            else:
                x = POOLS[part](x) if part in POOLS else self.get_submodule(part)(x)
        return x


def average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def maximum(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, stride=1, padding=1)


def shrink(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, stride=2)


POOLS = {AVERAGE: average, MAXIMUM: maximum, SHRINK: shrink}


def square(out: int, side: int = 1, stride: int = 1, padding: int = 0) -> Convolution:
    return out, (side, side), stride, (padding, padding)


def row(out: int, length: int) -> Convolution:
    return out, (1, length), 1, (0, length // 2)


def column(out: int, length: int) -> Convolution:
    return out, (length, 1), 1, (length // 2, 0)


def block_a(channels: int, pooled: int) -> Mixed:
    double = ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3")
    branches = [("branch1x1",), ("branch5x5_1", "branch5x5_2"), double, (AVERAGE, "branch_pool")]
    made = {
        "branch1x1": square(64),
        "branch5x5_1": square(48),
        "branch5x5_2": square(64, 5, padding=2),
        "branch3x3dbl_1": square(64),
        "branch3x3dbl_2": square(96, 3, padding=1),
        "branch3x3dbl_3": square(96, 3, padding=1),
        "branch_pool": square(pooled),
    }
    return Mixed(channels, branches, made)


def block_b(channels: int) -> Mixed:
    branches = [("branch3x3",), ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"), (SHRINK,)]
    made = {
        "branch3x3": square(384, 3, stride=2),
        "branch3x3dbl_1": square(64),
        "branch3x3dbl_2": square(96, 3, padding=1),
        "branch3x3dbl_3": square(96, 3, stride=2),
    }
    return Mixed(channels, branches, made)


def block_c(channels: int, inner: int) -> Mixed:
    single = ("branch7x7_1", "branch7x7_2", "branch7x7_3")
    double = tuple(f"branch7x7dbl_{number}" for number in range(1, 6))
    made = {
        "branch1x1": square(192),
        **dict(zip(single, (square(inner), row(inner, 7), column(192, 7)), strict=True)),
        "branch7x7dbl_1": square(inner),
        "branch7x7dbl_2": column(inner, 7),
        "branch7x7dbl_3": row(inner, 7),
        "branch7x7dbl_4": column(inner, 7),
        "branch7x7dbl_5": row(192, 7),
        "branch_pool": square(192),
    }
    return Mixed(channels, [("branch1x1",), single, double, (AVERAGE, "branch_pool")], made)


def block_d(channels: int) -> Mixed:
    long = tuple(f"branch7x7x3_{number}" for number in range(1, 5))
    made = {
        "branch3x3_1": square(192),
        "branch3x3_2": square(320, 3, stride=2),
        **dict(zip(long, (square(192), row(192, 7), column(192, 7), square(192, 3, stride=2)), strict=True)),
    }
    return Mixed(channels, [("branch3x3_1", "branch3x3_2"), long, (SHRINK,)], made)


def block_e(channels: int, pool: str) -> Mixed:
    double = ("branch3x3dbl_1", "branch3x3dbl_2", ("branch3x3dbl_3a", "branch3x3dbl_3b"))
    branches = [("branch1x1",), ("branch3x3_1", ("branch3x3_2a", "branch3x3_2b")), double, (pool, "branch_pool")]
    made = {
        "branch1x1": square(320),
        "branch3x3_1": square(384),
        "branch3x3_2a": row(384, 3),
        "branch3x3_2b": column(384, 3),
        "branch3x3dbl_1": square(448),
        "branch3x3dbl_2": square(384, 3, padding=1),
        "branch3x3dbl_3a": row(384, 3),
        "branch3x3dbl_3b": column(384, 3),
        "branch_pool": square(192),
    }
    return Mixed(channels, branches, made)


class FIDInception(nn.Sequential):
    """Images in −1 … 1 to the features of the last average pooling. Shape: (B, 3, 299, 299) → (B, 2048)."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvNorm(3, square(32, 3, stride=2))
        self.Conv2d_2a_3x3 = ConvNorm(32, square(32, 3))
        self.Conv2d_2b_3x3 = ConvNorm(32, square(64, 3, padding=1))
        self.pool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = ConvNorm(64, square(80))
        self.Conv2d_4a_3x3 = ConvNorm(80, square(192, 3))
        self.pool2 = nn.MaxPool2d(3, stride=2)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = block_a(192, 32), block_a(256, 64), block_a(288, 64)
        self.Mixed_6a, self.Mixed_6b = block_b(288), block_c(768, 128)
        self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = block_c(768, 160), block_c(768, 160), block_c(768, 192)
        self.Mixed_7a, self.Mixed_7b, self.Mixed_7c = block_d(768), block_e(1280, AVERAGE), block_e(2048, MAXIMUM)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).mean((2, 3))
