"""Stand-ins for `Unet` and `Unet1D` of denoising-diffusion-pytorch.

Class names, attribute names, the inline joins and what follows them are those of the originals; the code is our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import attend, conv_of, over_space, waves


class RMSNorm(nn.Module):
    """Unit length over the channels, times a gain per channel."""

    def __init__(self, dim: int, dims: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, dim, *[1] * dims))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.g * x.shape[1] ** 0.5


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return waves(x, self.dim)


class Block(nn.Module):
    """Convolution first, then the norm."""

    def __init__(self, dim: int, dim_out: int, dims: int) -> None:
        super().__init__()
        self.proj = conv_of(dims)(dim, dim_out, 3, padding=1)
        self.norm = RMSNorm(dim_out, dims)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, scale_shift: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = self.norm(self.proj(x))
        if scale_shift is not None:
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return self.act(x)


class ResnetBlock(nn.Module):
    def __init__(self, dim: int, dim_out: int, *, time_emb_dim: int, dims: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out * 2))
        self.block1 = Block(dim, dim_out, dims)
        self.block2 = Block(dim_out, dim_out, dims)
        self.res_conv = conv_of(dims)(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor, time_emb: Tensor) -> Tensor:
        scale, shift = over_space(self.mlp(time_emb), x).chunk(2, dim=1)
        return self.block2(self.block1(x, scale_shift=(scale, shift))) + self.res_conv(x)


class Attention(nn.Module):
    """Attention with learned extra keys and values: a concatenation that is not a long skip."""

    def __init__(self, dim: int, dims: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, dims)
        self.mem_kv = nn.Parameter(torch.randn(2, dim, 2))
        self.to_qkv = conv_of(dims)(dim, dim * 3, 1, bias=False)
        self.to_out = conv_of(dims)(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.to_qkv(self.norm(x)).flatten(2).chunk(3, dim=1)
        more_keys, more_values = (memory.expand(x.shape[0], -1, -1) for memory in self.mem_kv)
        keys, values = torch.cat((more_keys, keys), dim=-1), torch.cat((more_values, values), dim=-1)
        return self.to_out(attend(queries, keys, values).reshape(x.shape))


class LinearAttention(Attention):
    pass


class Residual(nn.Module):
    """The wrapper that `Unet1D` puts around its attention."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class Halve(nn.Module):
    """Moves 2x2 squares of space into channels."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_unshuffle(x, 2)


def downsample(dim: int, dim_out: int, dims: int) -> nn.Module:
    if dims == 1:
        return nn.Conv1d(dim, dim_out, 4, 2, 1)
    return nn.Sequential(Halve(), nn.Conv2d(dim * 4, dim_out, 1))


def upsample(dim: int, dim_out: int, dims: int) -> nn.Module:
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), conv_of(dims)(dim, dim_out, 3, padding=1))


class _Unet(nn.Module):
    """Two skips per level, and a last one from the first convolution to the last residual block."""

    dims: int

    def __init__(
        self, dim: int = 16, dim_mults: Sequence[int] = (1, 2), channels: int = 3, self_condition: bool = False
    ) -> None:
        super().__init__()
        dims, time_dim = self.dims, dim * 4
        conv = conv_of(dims)
        self.channels = channels
        self.self_condition = self_condition
        self.init_conv = conv(channels * (2 if self_condition else 1), dim, 7, padding=3)
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(dim), nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        widths = [dim, *(dim * factor for factor in dim_mults)]
        levels = list(zip(widths[:-1], widths[1:], strict=True))

        def block(width: int, out: int) -> ResnetBlock:
            return ResnetBlock(width, out, time_emb_dim=time_dim, dims=dims)

        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for level, (narrow, wide) in enumerate(levels):
            last = level == len(levels) - 1
            down = conv(narrow, wide, 3, padding=1) if last else downsample(narrow, wide, dims)
            parts = [block(narrow, narrow), block(narrow, narrow), self._attention(narrow, last), down]
            self.downs.append(nn.ModuleList(parts))
        self.mid_block1 = block(widths[-1], widths[-1])
        self.mid_attn = self._attention(widths[-1], True)
        self.mid_block2 = block(widths[-1], widths[-1])
        for level, (narrow, wide) in reversed(list(enumerate(levels))):
            up = conv(wide, narrow, 3, padding=1) if level == 0 else upsample(wide, narrow, dims)
            full = level == len(levels) - 1
            parts = [block(wide + narrow, wide), block(wide + narrow, wide), self._attention(wide, full), up]
            self.ups.append(nn.ModuleList(parts))
        self.final_res_block = block(dim * 2, dim)
        self.final_conv = conv(dim, channels, 1)

    def _attention(self, dim: int, full: bool) -> nn.Module:
        attention = (Attention if full else LinearAttention)(dim, self.dims)
        return Residual(attention) if self.dims == 1 else attention

    def _attended(self, attn: nn.Module, x: Tensor) -> Tensor:
        return attn(x) if self.dims == 1 else attn(x) + x

    def forward(self, x: Tensor, time: Tensor, x_self_cond: Tensor | None = None) -> Tensor:
        if self.self_condition:
            x_self_cond = torch.zeros_like(x) if x_self_cond is None else x_self_cond
            x = torch.cat((x_self_cond, x), dim=1)
        x = self.init_conv(x)
        r, t, h = x.clone(), self.time_mlp(time), []
        for block1, block2, attn, down in self.downs:  # type: ignore[misc]
            x = block1(x, t)
            h.append(x)
            x = self._attended(attn, block2(x, t))
            h.append(x)
            x = down(x)
        x = self.mid_block2(self._attended(self.mid_attn, self.mid_block1(x, t)), t)
        for block1, block2, attn, up in self.ups:  # type: ignore[misc]
            x = block1(torch.cat((x, h.pop()), dim=1), t)
            x = block2(torch.cat((x, h.pop()), dim=1), t)
            x = up(self._attended(attn, x))
        x = torch.cat((x, r), dim=1)
        return self.final_conv(self.final_res_block(x, t))


class Unet(_Unet):
    """Images of shape (B, channels, H, W)."""

    dims = 2


class Unet1D(_Unet):
    """Sequences of shape (B, channels, L)."""

    dims = 1
