"""Stand-ins for `SongUNet` and `DhariwalUNet` of EDM, and for its preconditioned wrapper.

Class names, attribute names, the inline joins and what follows them are those of the originals; the code is our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import silu

from .blocks import attend, over_space, root_half, waves


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Conv2d(nn.Module):
    """A convolution of its own making, with optional resampling; `kernel=0` only resamples."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, *, resample: str = "", gain: float = 1
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.up, self.down = resample == "up", resample == "down"
        shape = (out_channels, in_channels, kernel, kernel)
        scale = gain / max(1, in_channels * kernel**2) ** 0.5
        self.weight = nn.Parameter(torch.randn(shape) * scale) if kernel else None
        self.bias = nn.Parameter(torch.zeros(out_channels)) if kernel else None

    def forward(self, x: Tensor) -> Tensor:
        if self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
        if self.down:
            x = F.avg_pool2d(x, 2)
        return x if self.weight is None else F.conv2d(x, self.weight, self.bias, padding="same")


class GroupNorm(nn.Module):
    """Like torch's, but not a subclass of it."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.num_groups = num_channels // 4
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class UNetBlock(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        emb_channels: int,
        *,
        resample: str = "",
        attention: bool = False,
        skip_scale: float = 1,
        resample_proj: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.num_heads = 1 if attention else 0
        self.skip_scale = skip_scale
        self.norm0 = GroupNorm(in_channels)
        self.conv0 = Conv2d(in_channels, out_channels, 3, resample=resample)
        self.affine = Linear(emb_channels, out_channels * 2)
        self.norm1 = GroupNorm(out_channels)
        self.conv1 = Conv2d(out_channels, out_channels, 3, gain=0)
        self.skip = None
        if resample or in_channels != out_channels:
            kernel = 1 if resample_proj or in_channels != out_channels else 0
            self.skip = Conv2d(in_channels, out_channels, kernel, resample=resample)
        if attention:
            self.norm2 = GroupNorm(out_channels)
            self.qkv = Conv2d(out_channels, out_channels * 3, 1)
            self.proj = Conv2d(out_channels, out_channels, 1, gain=0)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        orig = x
        x = self.conv0(silu(self.norm0(x)))
        scale, shift = over_space(self.affine(emb), x).chunk(2, dim=1)
        x = self.conv1(silu(torch.addcmul(shift, self.norm1(x), scale + 1)))
        x = x.add_(orig if self.skip is None else self.skip(orig)) * self.skip_scale
        if self.num_heads:
            queries, keys, values = self.qkv(self.norm2(x)).flatten(2).chunk(3, dim=1)
            x = self.proj(attend(queries, keys, values).reshape(x.shape)).add_(x) * self.skip_scale
        return x


class _EDMUNet(nn.Module):
    """The mapping network and the `enc`/`dec` dictionaries that both architectures share."""

    block_options: dict[str, float | bool] = {}

    def __init__(self, resolution: int, channels: int, widths: Sequence[int], num_blocks: int, aux: bool) -> None:
        super().__init__()
        self._emb = widths[0] * 4
        self.map_layer0 = Linear(widths[0], self._emb)
        self.map_layer1 = Linear(self._emb, self._emb)
        self.enc, self.dec = nn.ModuleDict(), nn.ModuleDict()
        self._encoder(resolution, channels, widths, num_blocks, aux)
        passed = [block.out_channels for name, block in self.enc.items() if "aux" not in name]
        self._decoder(resolution, widths, num_blocks, passed)  # type: ignore[arg-type]

    def _block(self, channels: int, out_channels: int, **options: str | bool) -> UNetBlock:
        return UNetBlock(channels, out_channels, self._emb, **{**self.block_options, **options})  # type: ignore[arg-type]

    def _encoder(self, resolution: int, channels: int, widths: Sequence[int], num_blocks: int, aux: bool) -> None:
        width = widths[0]
        for level, out in enumerate(widths):
            size = f"{resolution >> level}x{resolution >> level}"
            if level == 0:
                self.enc[f"{size}_conv"] = Conv2d(channels, width, 3)
            else:
                self.enc[f"{size}_down"] = self._block(width, width, resample="down")
                if aux:
                    self.enc[f"{size}_aux_residual"] = Conv2d(channels, width, 3, resample="down")
                    channels = width
            for turn in range(num_blocks):
                self.enc[f"{size}_block{turn}"] = self._block(width, out, attention=level == len(widths) - 1)
                width = out

    def _decoder(self, resolution: int, widths: Sequence[int], num_blocks: int, passed: list[int]) -> None:
        width = widths[-1]
        for level in reversed(range(len(widths))):
            size = f"{resolution >> level}x{resolution >> level}"
            if level == len(widths) - 1:
                self.dec[f"{size}_in0"] = self._block(width, width, attention=True)
                self.dec[f"{size}_in1"] = self._block(width, width)
            else:
                self.dec[f"{size}_up"] = self._block(width, width, resample="up")
            for turn in range(num_blocks + 1):
                self.dec[f"{size}_block{turn}"] = self._block(width + passed.pop(), widths[level])
                width = widths[level]
            self._after_level(size, level, len(widths), width)

    def _after_level(self, size: str, level: int, levels: int, width: int) -> None:
        """A hook for auxiliary outputs."""

    def _embed(self, noise_labels: Tensor) -> Tensor:
        noise = waves(noise_labels, self.map_layer0.weight.shape[1])
        return silu(self.map_layer1(silu(self.map_layer0(noise))))


class DhariwalUNet(_EDMUNet):
    """The ADM architecture as EDM writes it."""

    def __init__(self, img_resolution: int = 8, in_channels: int = 3, widths: Sequence[int] = (16, 32)) -> None:
        super().__init__(img_resolution, in_channels, widths, num_blocks=1, aux=False)
        self.out_norm = GroupNorm(widths[0])
        self.out_conv = Conv2d(widths[0], in_channels, 3, gain=0)

    def forward(self, x: Tensor, noise_labels: Tensor, class_labels: Tensor | None = None) -> Tensor:
        emb, skips = self._embed(noise_labels), []
        for block in self.enc.values():
            x = block(x, emb) if isinstance(block, UNetBlock) else block(x)
            skips.append(x)
        for block in self.dec.values():
            if x.shape[1] != block.in_channels:
                x = torch.cat([x, skips.pop()], dim=1)
            x = block(x, emb)
        return self.out_conv(silu(self.out_norm(x)))


class SongUNet(_EDMUNet):
    """DDPM++, or NCSN++ with `encoder_type="residual"` or `decoder_type="skip"`: auxiliary branches beside skips."""

    block_options = {"skip_scale": root_half(), "resample_proj": True}

    def __init__(
        self,
        img_resolution: int = 8,
        in_channels: int = 3,
        widths: Sequence[int] = (16, 16, 32),
        encoder_type: str = "standard",
        decoder_type: str = "standard",
    ) -> None:
        self._decoder_type = decoder_type
        self._out_channels = in_channels
        super().__init__(img_resolution, in_channels, widths, num_blocks=1, aux=encoder_type == "residual")

    def _after_level(self, size: str, level: int, levels: int, width: int) -> None:
        if self._decoder_type != "skip" and level > 0:
            return
        if self._decoder_type == "skip" and level < levels - 1:
            self.dec[f"{size}_aux_up"] = Conv2d(self._out_channels, self._out_channels, 0, resample="up")
        self.dec[f"{size}_aux_norm"] = GroupNorm(width)
        self.dec[f"{size}_aux_conv"] = Conv2d(width, self._out_channels, 3, gain=0)

    def forward(self, x: Tensor, noise_labels: Tensor, class_labels: Tensor | None = None) -> Tensor:
        emb, skips, aux = self._embed(noise_labels), [], x
        for name, block in self.enc.items():
            if "aux_residual" in name:
                x = skips[-1] = aux = (x + block(aux)) * root_half()
                continue
            x = block(x, emb) if isinstance(block, UNetBlock) else block(x)
            skips.append(x)
        return self._decode(x, emb, skips)

    def _decode(self, x: Tensor, emb: Tensor, skips: list[Tensor]) -> Tensor:
        image, normed = None, x
        for name, block in self.dec.items():
            if "aux_up" in name:
                image = block(image)
            elif "aux_norm" in name:
                normed = block(x)
            elif "aux_conv" in name:
                drawn = block(silu(normed))
                image = drawn if image is None else drawn + image
            else:
                if x.shape[1] != block.in_channels:
                    x = torch.cat([x, skips.pop()], dim=1)
                x = block(x, emb)
        assert image is not None
        return image


class EDMPrecond(nn.Module):
    """The wrapper in which EDM's networks come: the network is `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        sigma = over_space(sigma, x)
        total = 1 + sigma**2
        return x / total + self.model(x * total.rsqrt(), sigma.flatten().log() / 4) * sigma * total.rsqrt()
