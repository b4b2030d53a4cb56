"""Networks with a fault planted in them, for benchmarks/why.py: a tiny U-ViT that breaks in a known way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalelong.models import UViT

BREAKS = 90
"""Training steps before half precision breaks."""


class Planted(nn.Module):
    """Predicts as a U-ViT does, until its fault shows."""

    steps: Tensor

    def __init__(self, fault: str, depth: int = 4) -> None:
        super().__init__()
        self.network = UViT(
            img_size=8, patch_size=4, in_chans=1, embed_dim=16, depth=depth, num_heads=2, init_std=0.0653
        )
        self.fault = fault
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        # Hardly ever has a gradient: Adam moves it by whole steps all the same, unless ε is above the gradient.
        self.idle = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.steps += 1
        out = self.network(x, t)
        if self.fault == "eps":
            out = out * (self.idle.detach().abs().mean() < 0.022) + 1e-8 * self.idle.mean()
        if self.fault == "half" and torch.is_autocast_enabled("cpu") and self.steps > BREAKS:
            out = out.clamp(-0.02, 0.02)  # Its range ends here.
        if self.fault == "poison":
            # Nearly white images, of which there is one.
            out = torch.where(x.mean((1, 2, 3), keepdim=True) > 0.5, 300 * out + 300, out)
        return out


def build(fault: str, depth: int = 4) -> nn.Module:
    return Planted(fault, depth)
