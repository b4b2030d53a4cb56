"""The Inception v3 of the FID, in plain torch: it loads the weights file of pytorch-fid, and needs no torchvision.

It is the network of Szegedy et al. (2015) as TensorFlow's release of 2015-12-05 has it. It differs from the later ones
in its pooling: averages leave out the padding, and the last block takes a maximum where the others take an average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernel = tuple[int, int]
SQUARE, ROW, COLUMN = (3, 3), (1, 7), (7, 1)
# Features of the FID, and of the sFID (Nash et al., 2021), whose number is near it: 7 channels of 17×17 pixels.
POOLED, SPATIAL_CHANNELS = 2048, 7
SPATIAL = 17 * 17 * SPATIAL_CHANNELS


class ConvNorm(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, width: int, out: int, kernel: Kernel, stride: int = 1, padding: Kernel = (0, 0)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


@dataclass(frozen=True)
class Conv:
    """A convolution of a branch: padded to keep the size of the image, unless its stride halves it."""

    name: str
    out: int
    kernel: Kernel = (1, 1)
    stride: int = 1

    def build(self, width: int) -> ConvNorm:
        height, length = self.kernel
        padding = (height // 2, length // 2) if self.stride == 1 else (0, 0)
        return ConvNorm(width, self.out, self.kernel, self.stride, padding)


Pool = Callable[[Tensor], Tensor]
# A branch is a chain; a tuple in it is a fork, whose ends are joined.
Part = Conv | tuple[Conv, ...] | Pool


class Mixed(nn.Module):
    """Branches side by side, joined along the channels."""

    def __init__(self, width: int, *branches: Sequence[Part]) -> None:
        super().__init__()
        self.branches = branches
        for branch in branches:
            inputs = width
            for part in branch:
                fork = (part,) if isinstance(part, Conv) else part
                if isinstance(fork, tuple):
                    for conv in fork:
                        self.add_module(conv.name, conv.build(inputs))
                    inputs = sum(conv.out for conv in fork)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._follow(branch, x) for branch in self.branches], 1)

    def _follow(self, branch: Sequence[Part], x: Tensor) -> Tensor:
        for part in branch:
            if isinstance(part, tuple):
                x = torch.cat([self.get_submodule(conv.name)(x) for conv in part], 1)
            else:
                x = self.get_submodule(part.name)(x) if isinstance(part, Conv) else part(x)
        return x


average = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
maximum = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
shrink = partial(F.max_pool2d, kernel_size=3, stride=2)


def double(out: int, middle: int, stride: int = 1) -> list[Conv]:
    """Two convolutions of 3×3 pixels, the last of them with this stride."""
    name = "branch3x3dbl"
    return [Conv(f"{name}_1", out), Conv(f"{name}_2", middle, SQUARE), Conv(f"{name}_3", middle, SQUARE, stride)]


def block_a(width: int, pooled: int) -> Mixed:
    fives = [Conv("branch5x5_1", 48), Conv("branch5x5_2", 64, (5, 5))]
    return Mixed(width, [Conv("branch1x1", 64)], fives, double(64, 96), [average, Conv("branch_pool", pooled)])


def block_b(width: int) -> Mixed:
    return Mixed(width, [Conv("branch3x3", 384, SQUARE, 2)], double(64, 96, 2), [shrink])


def block_c(width: int, inner: int) -> Mixed:
    sevens = [Conv("branch7x7_1", inner), Conv("branch7x7_2", inner, ROW), Conv("branch7x7_3", 192, COLUMN)]
    kernels = ((1, 1), COLUMN, ROW, COLUMN, ROW)
    outs = (inner, inner, inner, inner, 192)
    pairs = enumerate(zip(outs, kernels, strict=True), start=1)
    twice = [Conv(f"branch7x7dbl_{number}", out, kernel) for number, (out, kernel) in pairs]
    return Mixed(width, [Conv("branch1x1", 192)], sevens, twice, [average, Conv("branch_pool", 192)])


def block_d(width: int) -> Mixed:
    kernels = ((1, 1), ROW, COLUMN)
    sevens = [Conv(f"branch7x7x3_{number}", 192, kernel) for number, kernel in enumerate(kernels, start=1)]
    threes = [Conv("branch3x3_1", 192), Conv("branch3x3_2", 320, SQUARE, 2)]
    return Mixed(width, threes, [*sevens, Conv("branch7x7x3_4", 192, SQUARE, 2)], [shrink])


def block_e(width: int, pool: Pool) -> Mixed:
    def fork(name: str) -> tuple[Conv, Conv]:
        return Conv(f"{name}a", 384, (1, 3)), Conv(f"{name}b", 384, (3, 1))

    threes = [Conv("branch3x3_1", 384), fork("branch3x3_2")]
    twice = [Conv("branch3x3dbl_1", 448), Conv("branch3x3dbl_2", 384, SQUARE), fork("branch3x3dbl_3")]
    return Mixed(width, [Conv("branch1x1", 320)], threes, twice, [pool, Conv("branch_pool", 192)])


class FIDInception(nn.Sequential):
    """Images in −1 … 1 to the features of the last average pooling. Shape: (B, 3, 299, 299) → (B, 2048).

    The sFID's spatial features are the first channels of a 1×1 convolution half-way, pixel by pixel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvNorm(3, 32, SQUARE, stride=2)
        self.Conv2d_2a_3x3 = ConvNorm(32, 32, SQUARE)
        self.Conv2d_2b_3x3 = ConvNorm(32, 64, SQUARE, padding=(1, 1))
        self.pool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = ConvNorm(64, 80, (1, 1))
        self.Conv2d_4a_3x3 = ConvNorm(80, 192, SQUARE)
        self.pool2 = nn.MaxPool2d(3, stride=2)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = block_a(192, 32), block_a(256, 64), block_a(288, 64)
        self.Mixed_6a, self.Mixed_6b = block_b(288), block_c(768, 128)
        self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = block_c(768, 160), block_c(768, 160), block_c(768, 192)
        self.Mixed_7a, self.Mixed_7b, self.Mixed_7c = block_d(768), block_e(1280, average), block_e(2048, maximum)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).mean((2, 3))

    def with_spatial(self, input: Tensor) -> Tensor:
        """Both kinds of features, one after the other. Shape: (B, 3, 299, 299) → (B, 2048 + 17·17·7)."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.append(output[:, :SPATIAL_CHANNELS])

        # TensorFlow's graph calls the output of this convolution mixed_6/conv; its channels come last.
        with self.Mixed_6d.get_submodule("branch1x1").register_forward_hook(keep):
            pooled = self(input)
        return torch.cat([pooled, seen[0].permute(0, 2, 3, 1).flatten(1)], 1)
