"""Stand-ins for the ADM `UNetModel` of improved-diffusion, guided-diffusion and latent-diffusion.

Class names, attribute names, the inline join and what follows it are those of the originals; the code is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import attend, over_space, waves


class GroupNorm32(nn.GroupNorm):
    """GroupNorm computed in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).type(input.dtype)


def normalization(channels: int) -> GroupNorm32:
    return GroupNorm32(4, channels)


class TimestepBlock(nn.Module):
    """A module whose second argument is the time embedding."""


class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    """A sequence that hands the embedding, or the context, to those members that want it."""

    def forward(self, x: Tensor, emb: Tensor, context: Tensor | None = None) -> Tensor:  # type: ignore[override]
        for layer in self:
            if isinstance(layer, TimestepBlock):
                x = layer(x, emb)
            elif isinstance(layer, SpatialTransformer):
                x = layer(x, context)
            else:
                x = layer(x)
        return x


class Upsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool) -> None:
        super().__init__()
        self.channels = channels
        self.use_conv = use_conv
        if use_conv:
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.conv(x) if self.use_conv else x


class Downsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool) -> None:
        super().__init__()
        self.channels = channels
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1) if use_conv else nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class ResBlock(TimestepBlock):
    """Norm, activation, convolution; then the embedding; then the same again; beside an optional 1x1 shortcut."""

    def __init__(
        self, channels: int, emb_channels: int, out_channels: int, *, resample: str = "", scale_shift: bool = False
    ) -> None:
        super().__init__()
        self.channels = channels
        self.out_channels = out_channels
        self.use_scale_shift_norm = scale_shift
        self.in_layers = nn.Sequential(
            normalization(channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.updown = bool(resample)
        resampler = {"up": Upsample, "down": Downsample}.get(resample)
        self.h_upd = resampler(channels, False) if resampler else nn.Identity()
        self.x_upd = resampler(channels, False) if resampler else nn.Identity()
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, out_channels * (2 if scale_shift else 1)))
        last = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.out_layers = nn.Sequential(normalization(out_channels), nn.SiLU(), nn.Dropout(0.0), zeroed(last))
        same = out_channels == channels
        self.skip_connection = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        if self.updown:
            h = self.in_layers[-1](self.h_upd(self.in_layers[:-1](x)))
            x = self.x_upd(x)
        else:
            h = self.in_layers(x)
        shift = over_space(self.emb_layers(emb), h)
        if self.use_scale_shift_norm:
            scale, shift = shift.chunk(2, dim=1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + shift)
        return self.skip_connection(x) + h


def zeroed(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


class AttentionBlock(nn.Module):
    """Self attention over space, added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.norm = normalization(channels)
        self.qkv = nn.Conv1d(channels, channels * 3, 1)
        self.proj_out = zeroed(nn.Conv1d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2)
        queries, keys, values = self.qkv(self.norm(tokens)).chunk(3, dim=1)
        return (tokens + self.proj_out(attend(queries, keys, values))).reshape(x.shape)


class SpatialTransformer(nn.Module):
    """Cross attention from space to a context of shape (B, L, context_dim), added to its input."""

    def __init__(self, in_channels: int, context_dim: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, in_channels)
        self.proj_in = nn.Conv2d(in_channels, in_channels, 1)
        self.transformer_blocks = nn.ModuleList([nn.Linear(context_dim, in_channels * 2)])
        self.proj_out = zeroed(nn.Conv2d(in_channels, in_channels, 1))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        assert context is not None, "a spatial transformer needs a context"
        queries = self.proj_in(self.norm(x)).flatten(2)
        keys, values = self.transformer_blocks[0](context).transpose(1, 2).chunk(2, dim=1)
        return x + self.proj_out(attend(queries, keys, values).reshape(x.shape))


class UNetModel(nn.Module):
    """`input_blocks`, `middle_block`, `output_blocks`; every input block's output is joined inline to an output block's
    input."""

    def __init__(
        self,
        model_channels: int = 16,
        channel_mult: Sequence[int] = (1, 2),
        num_res_blocks: int = 1,
        *,
        in_channels: int = 3,
        attention_levels: Sequence[int] = (1,),
        num_classes: int | None = None,
        context_dim: int | None = None,
        resblock_updown: bool = False,
        use_scale_shift_norm: bool = False,
    ) -> None:
        super().__init__()
        self.model_channels = model_channels
        self.num_classes = num_classes
        self._context_dim = context_dim
        self._updown = resblock_updown
        self._scale_shift = use_scale_shift_norm
        self._emb = model_channels * 4
        self.time_embed = nn.Sequential(
            nn.Linear(model_channels, self._emb), nn.SiLU(), nn.Linear(self._emb, self._emb)
        )
        if num_classes is not None:
            self.label_emb = nn.Embedding(num_classes, self._emb)
        widths = [model_channels * factor for factor in channel_mult]
        self.input_blocks = nn.ModuleList(
            [TimestepEmbedSequential(nn.Conv2d(in_channels, model_channels, 3, padding=1))]
        )
        passed = self._encoder(widths, num_res_blocks, attention_levels)
        deep = widths[-1]
        self.middle_block = TimestepEmbedSequential(self._res(deep, deep), self._attention(deep), self._res(deep, deep))
        self.output_blocks = nn.ModuleList()
        self._decoder(widths, num_res_blocks, attention_levels, passed)
        self.out = nn.Sequential(
            normalization(widths[0]), nn.SiLU(), zeroed(nn.Conv2d(widths[0], in_channels, 3, padding=1))
        )

    def _res(self, channels: int, out_channels: int, resample: str = "") -> ResBlock:
        return ResBlock(channels, self._emb, out_channels, resample=resample, scale_shift=self._scale_shift)

    def _attention(self, channels: int) -> nn.Module:
        return (
            AttentionBlock(channels) if self._context_dim is None else SpatialTransformer(channels, self._context_dim)
        )

    def _encoder(self, widths: list[int], repeats: int, attention_levels: Sequence[int]) -> list[int]:
        passed, channels = [self.model_channels], self.model_channels
        for level, width in enumerate(widths):
            for _ in range(repeats):
                attention = [self._attention(width)] if level in attention_levels else []
                self.input_blocks.append(TimestepEmbedSequential(self._res(channels, width), *attention))
                channels = width
                passed.append(channels)
            if level < len(widths) - 1:
                down = self._res(channels, channels, "down") if self._updown else Downsample(channels, True)
                self.input_blocks.append(TimestepEmbedSequential(down))
                passed.append(channels)
        return passed

    def _decoder(self, widths: list[int], repeats: int, attention_levels: Sequence[int], passed: list[int]) -> None:
        channels = widths[-1]
        for level in reversed(range(len(widths))):
            for turn in range(repeats + 1):
                layers: list[nn.Module] = [self._res(channels + passed.pop(), widths[level])]
                channels = widths[level]
                if level in attention_levels:
                    layers.append(self._attention(channels))
                if level > 0 and turn == repeats:
                    layers.append(self._res(channels, channels, "up") if self._updown else Upsample(channels, True))
                self.output_blocks.append(TimestepEmbedSequential(*layers))

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        emb = self.time_embed(waves(timesteps, self.model_channels))
        if self.num_classes is not None:
            emb = emb + self.label_emb(cast(Tensor, y))
        hs, h = [], x
        for module in self.input_blocks:
            h = module(h, emb, context)
            hs.append(h)
        h = self.middle_block(h, emb, context)
        for module in self.output_blocks:
            h = torch.cat([h, hs.pop()], dim=1)
            h = module(h, emb, context)
        return self.out(h)
