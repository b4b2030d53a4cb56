"""Stand-in for k-diffusion's `ImageDenoiserModelV1` and its `Denoiser`.

Class names, attribute names, the `skip` argument and what follows the join are those of the original; the code is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import attend, over_space, waves

Condition = dict[str, Any]


class ConditionedModule(nn.Module):
    """A module whose second argument is the conditioning."""


class ConditionedSequential(nn.Sequential, ConditionedModule):
    def forward(self, input: Tensor, cond: Condition) -> Tensor:  # type: ignore[override]
        for module in self:
            input = module(input, cond) if isinstance(module, ConditionedModule) else module(input)
        return input


class AdaGN(ConditionedModule):
    """Group norm with a scale and a shift from the conditioning."""

    def __init__(self, feats_in: int, c_out: int, num_groups: int) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.eps = 1e-5
        self.mapper = nn.Linear(feats_in, c_out * 2)
        nn.init.zeros_(self.mapper.weight)
        nn.init.zeros_(self.mapper.bias)

    def forward(self, input: Tensor, cond: Condition) -> Tensor:
        scale, shift = over_space(self.mapper(cond["cond"]), input).chunk(2, dim=1)
        return F.group_norm(input, self.num_groups, eps=self.eps) * (scale + 1) + shift


class ConditionedResidualBlock(ConditionedModule):
    def __init__(self, *main: nn.Module, skip: nn.Module | None = None) -> None:
        super().__init__()
        self.main = ConditionedSequential(*main)
        self.skip = nn.Identity() if skip is None else skip

    def forward(self, input: Tensor, cond: Condition) -> Tensor:
        skip = self.skip(input)
        return self.main(input, cond) + skip


class ResConvBlock(ConditionedResidualBlock):
    def __init__(self, feats_in: int, c_in: int, c_mid: int, c_out: int) -> None:
        super().__init__(
            AdaGN(feats_in, c_in, c_in // 8),
            nn.GELU(),
            nn.Conv2d(c_in, c_mid, 3, padding=1),
            nn.Dropout2d(0.0, inplace=True),
            AdaGN(feats_in, c_mid, c_mid // 8),
            nn.GELU(),
            nn.Conv2d(c_mid, c_out, 3, padding=1),
            nn.Dropout2d(0.0, inplace=True),
            skip=None if c_in == c_out else nn.Conv2d(c_in, c_out, 1, bias=False),
        )


class SelfAttention2d(ConditionedModule):
    def __init__(self, feats_in: int, c_in: int) -> None:
        super().__init__()
        self.norm_in = AdaGN(feats_in, c_in, c_in // 8)
        self.qkv_proj = nn.Conv2d(c_in, c_in * 3, 1)
        self.out_proj = nn.Conv2d(c_in, c_in, 1)

    def forward(self, input: Tensor, cond: Condition) -> Tensor:
        queries, keys, values = self.qkv_proj(self.norm_in(input, cond)).flatten(2).chunk(3, dim=1)
        return input + self.out_proj(attend(queries, keys, values).reshape(input.shape))


def levels_of(feats_in: int, layers: int, c_in: int, c_mid: int, c_out: int, attention: bool) -> list[nn.Module]:
    """The residual blocks of one level, each followed by attention if wanted."""
    modules: list[nn.Module] = []
    for layer in range(layers):
        out = c_out if layer == layers - 1 else c_mid
        modules.append(ResConvBlock(feats_in, c_in if layer == 0 else c_mid, c_mid, out))
        if attention:
            modules.append(SelfAttention2d(feats_in, out))
    return modules


class DBlock(ConditionedSequential):
    def __init__(self, modules: list[nn.Module], downsample: bool) -> None:
        super().__init__(nn.AvgPool2d(2) if downsample else nn.Identity(), *modules)


class UBlock(ConditionedSequential):
    """The skip, if there is one, is joined behind the input's channels."""

    def __init__(self, modules: list[nn.Module], upsample: bool) -> None:
        super().__init__(*modules, nn.Upsample(scale_factor=2) if upsample else nn.Identity())

    def forward(self, input: Tensor, cond: Condition, skip: Tensor | None = None) -> Tensor:
        if skip is not None:
            input = torch.cat([input, skip], dim=1)
        return super().forward(input, cond)


class UNet(ConditionedModule):
    """The innermost level's output goes straight to the first up block, which gets no skip."""

    def __init__(self, d_blocks: list[nn.Module], u_blocks: list[nn.Module], skip_stages: int = 0) -> None:
        super().__init__()
        self.d_blocks = nn.ModuleList(d_blocks)
        self.u_blocks = nn.ModuleList(u_blocks)
        self.skip_stages = skip_stages

    def forward(self, input: Tensor, cond: Condition) -> Tensor:
        skips = []
        for block in self.d_blocks[self.skip_stages :]:
            input = block(input, cond)
            skips.append(input)
        for turn, (block, skip) in enumerate(zip(self.u_blocks, reversed(skips), strict=False)):
            input = block(input, cond, skip if turn > 0 else None)
        return input


class ImageDenoiserModelV1(nn.Module):
    def __init__(
        self,
        c_in: int = 3,
        feats_in: int = 16,
        depths: Sequence[int] = (1, 2, 1),
        channels: Sequence[int] = (16, 16, 32),
        skip_stages: int = 0,
    ) -> None:
        super().__init__()
        self.feats_in = feats_in
        outer = channels[max(0, skip_stages - 1)]
        self.mapping = nn.Sequential(nn.Linear(feats_in, feats_in), nn.GELU())
        self.proj_in = nn.Conv2d(c_in, outer, 1)
        self.proj_out = nn.Conv2d(outer, c_in, 1)
        nn.init.zeros_(self.proj_out.weight)
        downs: list[nn.Module] = []
        ups: list[nn.Module] = []
        for level, (layers, width) in enumerate(zip(depths, channels, strict=True)):
            narrow, last = channels[max(0, level - 1)], level == len(depths) - 1
            downs.append(DBlock(levels_of(feats_in, layers, narrow, width, width, last), level > skip_stages))
            joined = width if last else width * 2
            ups.append(UBlock(levels_of(feats_in, layers, joined, width, narrow, last), level > skip_stages))
        self.u_net = UNet(downs, ups[::-1], skip_stages)

    def forward(self, input: Tensor, sigma: Tensor) -> Tensor:
        cond = {"cond": self.mapping(waves(sigma.log() / 4, self.feats_in))}
        return self.proj_out(self.u_net(self.proj_in(input), cond))


class Denoiser(nn.Module):
    """The wrapper in which the network comes: the network is `inner_model`."""

    def __init__(self, inner_model: nn.Module) -> None:
        super().__init__()
        self.inner_model = inner_model

    def forward(self, input: Tensor, sigma: Tensor) -> Tensor:
        total = 1 + over_space(sigma, input) ** 2
        return self.inner_model(input * total.rsqrt(), sigma) * over_space(sigma, input) * total.rsqrt() + input / total
