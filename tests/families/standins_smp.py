"""Stand-in for segmentation-models-pytorch's `Unet`.

Class names, attribute names, the `skip_connection` keyword and what follows the join are those of the original; the
code is our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Conv2dReLU(nn.Sequential):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        super().__init__(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True))


class SCSEModule(nn.Module):
    """Attention over channels and over space."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.cSE = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(in_channels, in_channels, 1), nn.Sigmoid())
        self.sSE = nn.Sequential(nn.Conv2d(in_channels, 1, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.cSE(x) + x * self.sSE(x)


class Attention(nn.Module):
    """The identity, unless attention is asked for by name."""

    def __init__(self, name: str | None, in_channels: int) -> None:
        super().__init__()
        self.attention = nn.Identity() if name is None else SCSEModule(in_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


class UnetDecoderBlock(nn.Module):
    def __init__(self, in_channels: int, skip_channels: int, out_channels: int, attention_type: str | None) -> None:
        super().__init__()
        self.conv1 = Conv2dReLU(in_channels + skip_channels, out_channels)
        self.attention1 = Attention(attention_type, in_channels + skip_channels)
        self.conv2 = Conv2dReLU(out_channels, out_channels)
        self.attention2 = Attention(attention_type, out_channels)

    def forward(
        self, feature_map: Tensor, target_height: int, target_width: int, skip_connection: Tensor | None = None
    ) -> Tensor:
        feature_map = F.interpolate(feature_map, size=(target_height, target_width), mode="nearest")
        if skip_connection is not None:
            feature_map = self.attention1(torch.cat([feature_map, skip_connection], dim=1))
        return self.attention2(self.conv2(self.conv1(feature_map)))


class UnetDecoder(nn.Module):
    """The last block has no skip: the image itself is not passed on."""

    def __init__(
        self, encoder_channels: Sequence[int], decoder_channels: Sequence[int], attention_type: str | None
    ) -> None:
        super().__init__()
        deep_first = list(encoder_channels[1:])[::-1]
        inputs = [deep_first[0], *decoder_channels[:-1]]
        skips = [*deep_first[1:], 0]
        self.center = nn.Identity()
        sizes = zip(inputs, skips, decoder_channels, strict=True)
        self.blocks = nn.ModuleList(UnetDecoderBlock(*size, attention_type) for size in sizes)

    def forward(self, features: list[Tensor]) -> Tensor:
        shapes = [feature.shape[2:] for feature in features][::-1]
        head, *skips = features[1:][::-1]
        x = self.center(head)
        for turn, block in enumerate(self.blocks):
            skip = skips[turn] if turn < len(skips) else None
            x = block(x, *shapes[turn + 1], skip_connection=skip)
        return x


class ResNetEncoder(nn.Module):
    """Features of every scale, the image itself first."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.out_channels = tuple(channels)
        pairs = zip(channels[:-1], channels[1:], strict=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.AvgPool2d(2), Conv2dReLU(*pair)) for pair in pairs)

    def forward(self, x: Tensor) -> list[Tensor]:
        features = [x]
        for layer in self.layers:
            features.append(layer(features[-1]))
        return features


class Unet(nn.Module):
    def __init__(
        self,
        encoder_channels: Sequence[int] = (3, 8, 8, 16),
        decoder_channels: Sequence[int] = (16, 8, 8),
        decoder_attention_type: str | None = None,
    ) -> None:
        super().__init__()
        self.encoder = ResNetEncoder(encoder_channels)
        self.decoder = UnetDecoder(encoder_channels, decoder_channels, decoder_attention_type)
        self.segmentation_head = nn.Sequential(
            nn.Conv2d(decoder_channels[-1], 1, 3, padding=1), nn.Identity(), nn.Identity()
        )
        self.classification_head = None

    def forward(self, x: Tensor) -> Tensor:
        return self.segmentation_head(self.decoder(self.encoder(x)))
