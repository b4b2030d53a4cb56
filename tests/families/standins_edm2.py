"""Stand-in for the `UNet` of EDM2 and its wrapper `Precond`.

Class names, attribute names, the weighted join and what follows it are those of the original; the code is our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import attend, over_space


def unit(x: Tensor, dims: list[int]) -> Tensor:
    """x with a root mean square of one over `dims`."""
    return x / (x.square().mean(dims, keepdim=True).sqrt() + 1e-4)


def mp_silu(x: Tensor) -> Tensor:
    return F.silu(x) / 0.596


def mp_sum(a: Tensor, b: Tensor, share: float) -> Tensor:
    return a.lerp(b, share) / ((1 - share) ** 2 + share**2) ** 0.5


def mp_cat(a: Tensor, b: Tensor, share: float) -> Tensor:
    """Both parts, weighted so that `share` says how much the second contributes and the magnitude is kept."""
    size = ((a.shape[1] + b.shape[1]) / ((1 - share) ** 2 + share**2)) ** 0.5
    of_a, of_b = size * (1 - share) / a.shape[1] ** 0.5, size * share / b.shape[1] ** 0.5
    return torch.cat([of_a * a, of_b * b], dim=1)


class MPFourier(nn.Module):
    freqs: Tensor
    phases: Tensor

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.randn(num_channels))
        self.register_buffer("phases", torch.rand(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None] * self.freqs + self.phases).cos() * 2**0.5


class MPConv(nn.Module):
    """A convolution, or a linear layer for an empty kernel, whose weight is normalised at every call."""

    def __init__(self, in_channels: int, out_channels: int, kernel: Sequence[int]) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, *kernel))

    def forward(self, x: Tensor, gain: float | Tensor = 1) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(self._normalised())
        weight = self._normalised() * (gain / self.weight[0].numel() ** 0.5)
        return x @ weight.t() if weight.dim() == 2 else F.conv2d(x, weight, padding="same")

    def _normalised(self) -> Tensor:
        return unit(self.weight, list(range(1, self.weight.dim())))


class Block(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        emb_channels: int,
        flavor: str,
        resample_mode: str = "keep",
        attention: bool = False,
    ) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.flavor = flavor
        self.resample_mode = resample_mode
        self.num_heads = 1 if attention else 0
        self.emb_gain = nn.Parameter(torch.zeros([]))
        self.conv_res0 = MPConv(out_channels if flavor == "enc" else in_channels, out_channels, [3, 3])
        self.emb_linear = MPConv(emb_channels, out_channels, [])
        self.conv_res1 = MPConv(out_channels, out_channels, [3, 3])
        self.conv_skip = MPConv(in_channels, out_channels, [1, 1]) if in_channels != out_channels else None
        self.attn_qkv = MPConv(out_channels, out_channels * 3, [1, 1]) if attention else None
        self.attn_proj = MPConv(out_channels, out_channels, [1, 1]) if attention else None

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        x = self._resample(x)
        if self.flavor == "enc":
            x = unit(x if self.conv_skip is None else self.conv_skip(x), [1])
        y = self.conv_res0(mp_silu(x))
        gain = self.emb_linear(emb, gain=self.emb_gain) + 1
        y = self.conv_res1(mp_silu(y * over_space(gain, y)))
        if self.flavor == "dec" and self.conv_skip is not None:
            x = self.conv_skip(x)
        x = mp_sum(x, y, 0.3)
        if self.attn_qkv is not None and self.attn_proj is not None:
            queries, keys, values = (unit(part, [1]) for part in self.attn_qkv(x).flatten(2).chunk(3, dim=1))
            x = mp_sum(x, self.attn_proj(attend(queries, keys, values).reshape(x.shape)), 0.3)
        return x.clip_(-256, 256)

    def _resample(self, x: Tensor) -> Tensor:
        if self.resample_mode == "up":
            return F.interpolate(x, scale_factor=2, mode="nearest")
        return F.avg_pool2d(x, 2) if self.resample_mode == "down" else x


class UNet(nn.Module):
    """`enc` and `dec` dictionaries; in `dec` the blocks with "block" in their name take a skip."""

    def __init__(
        self, img_resolution: int = 8, img_channels: int = 3, widths: Sequence[int] = (16, 32), num_blocks: int = 1
    ) -> None:
        super().__init__()
        self._emb = max(widths)
        self.concat_balance = 0.5
        self.out_gain = nn.Parameter(torch.zeros([]))
        self.emb_fourier = MPFourier(widths[0])
        self.emb_noise = MPConv(widths[0], self._emb, [])
        self.emb_label = None
        self.enc, self.dec = nn.ModuleDict(), nn.ModuleDict()
        sizes = [f"{img_resolution >> level}x{img_resolution >> level}" for level in range(len(widths))]
        width = widths[0]
        for level, size in enumerate(sizes):
            if level == 0:
                self.enc[f"{size}_conv"] = MPConv(img_channels + 1, width, [3, 3])
            else:
                self.enc[f"{size}_down"] = Block(width, width, self._emb, "enc", resample_mode="down")
            for turn in range(num_blocks):
                self.enc[f"{size}_block{turn}"] = Block(width, widths[level], self._emb, "enc", attention=level > 0)
                width = widths[level]
        self._decoder(sizes, widths, num_blocks)
        self.out_conv = MPConv(widths[0], img_channels, [3, 3])

    def _decoder(self, sizes: list[str], widths: Sequence[int], num_blocks: int) -> None:
        passed: list[int] = [block.out_channels for block in self.enc.values()]  # type: ignore[misc]
        width = widths[-1]
        for level, size in reversed(list(enumerate(sizes))):
            if level == len(sizes) - 1:
                self.dec[f"{size}_in0"] = Block(width, width, self._emb, "dec", attention=True)
                self.dec[f"{size}_in1"] = Block(width, width, self._emb, "dec")
            else:
                self.dec[f"{size}_up"] = Block(width, width, self._emb, "dec", resample_mode="up")
            for turn in range(num_blocks + 1):
                self.dec[f"{size}_block{turn}"] = Block(width + passed.pop(), widths[level], self._emb, "dec")
                width = widths[level]

    def forward(self, x: Tensor, noise_labels: Tensor, class_labels: Tensor | None = None) -> Tensor:
        emb = mp_silu(self.emb_noise(self.emb_fourier(noise_labels)))
        x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        skips = []
        for name, block in self.enc.items():
            x = block(x) if "conv" in name else block(x, emb)
            skips.append(x)
        for name, block in self.dec.items():
            if "block" in name:
                x = mp_cat(x, skips.pop(), self.concat_balance)
            x = block(x, emb)
        return self.out_conv(x, gain=self.out_gain)


class Precond(nn.Module):
    """The wrapper in which the network comes: the network is `unet`."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet()

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        sigma = over_space(sigma, x)
        total = 1 + sigma**2
        return x / total + self.unet(x * total.rsqrt(), sigma.flatten().log() / 4) * sigma * total.rsqrt()
