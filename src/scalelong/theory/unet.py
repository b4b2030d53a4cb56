"""The UNet of the paper's analysis (Eq. 3): fully connected blocks, skips that are added."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Generator, Tensor, nn


class Decoder(nn.Module):
    """b_i: a block applied to the sum of the long skip and what comes from below. Shape: (B, m), (B, m) → (B, m)."""

    def __init__(self, mlp: nn.Sequential) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.mlp(skip + x)


class TheoryUNet(nn.Module):
    """UNet(x) = f_0(x), with f_i(x) = b_{i+1}(a_{i+1}(x) + f_{i+1}(a_{i+1}(x))) for i < N (Eq. 3, every κ = 1).

    The encoders a_i, the middle block f_N and the decoders b_i are MLPs W_l σ(W_{l−1} … σ(W_1 x)) without biases,
    σ = ReLU, W ∈ R^{m×m} with entries from N(0, 2/m). `encoders[i]` is a_{i+1} and `decoders[i]` is b_{i+1}:
    item 0 belongs to the outermost skip. Shape: (B, m) → (B, m), m = width, N = num_skips, l = block_depth.

    >>> model = TheoryUNet(8, 3, generator=torch.Generator().manual_seed(0))
    >>> model(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, width: int, num_skips: int, *, block_depth: int = 2, generator: Generator | None = None) -> None:
        super().__init__()
        _check_positive(width=width, num_skips=num_skips, block_depth=block_depth)
        self.width = width
        self.num_skips = num_skips

        def block() -> nn.Sequential:
            return _mlp(width, block_depth, generator)

        self.encoders = nn.ModuleList(block() for _ in range(num_skips))
        self.middle = block()
        self.decoders = nn.ModuleList(Decoder(block()) for _ in range(num_skips))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
        x = self.middle(x)
        for decoder in reversed(self.decoders):
            x = decoder(x, skips.pop())
        return x


def _mlp(width: int, depth: int, generator: Generator | None) -> nn.Sequential:
    layers = [_kaiming_linear(width, generator) for _ in range(depth)]
    between = itertools.chain.from_iterable((nn.ReLU(), layer) for layer in layers[1:])
    return nn.Sequential(layers[0], *between)


def _kaiming_linear(width: int, generator: Generator | None) -> nn.Linear:
    # nn.Linear's own initialisation would move the global generator, even for a caller who passes another.
    linear = nn.Linear(width, width, bias=False, device="meta").to_empty(device=torch.get_default_device())
    nn.init.normal_(linear.weight, std=math.sqrt(2 / width), generator=generator)
    return linear


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"TheoryUNet needs {name} of at least 1, got {size}")
