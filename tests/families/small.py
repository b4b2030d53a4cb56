"""Small models that the tests of the core share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalelong import Channels, SkipScaling, SkipSite
from scalelong.models import UViT


def uvit(**options: object) -> UViT:
    return UViT(img_size=8, patch_size=2, embed_dim=32, depth=6, num_heads=2, **options).eval()


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 8, 8), torch.tensor([3.0, 700.0])


class Halve(SkipScaling):
    def coefficient(self, index: int, skip: Tensor) -> Tensor:
        return skip.new_tensor(0.5)


class Decoder(nn.Module):
    """Reads a joined tensor of 8 channels, of which 4 are the skip, with one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, joined: Tensor) -> Tensor:
        return self.layer(joined)


def decoder(layer: nn.Module) -> tuple[nn.Module, list[SkipSite]]:
    site = SkipSite(1, "decoder", Channels(4, 8), width=4, readers=("decoder.layer",))
    return nn.ModuleDict({"decoder": Decoder(layer)}), [site]
