"""Which layers of a network are replaced."""

from __future__ import annotations

import torch
from torch import nn

from ...models.uvit import MLP, Attention
from ...recipes.steady import SteadyAttention, SteadyLinear, SteadyMLP
from .attention import AttentionInParts
from .dropout import QuickDropout
from .linear import TokenLinear, TokenMLP

FASTER: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: TokenLinear,
    SteadyLinear: TokenLinear,
    nn.Dropout: QuickDropout,
    Attention: AttentionInParts,
    SteadyAttention: AttentionInParts,
    MLP: TokenMLP,
    SteadyMLP: TokenMLP,
}


def take_cpu_layers(network: nn.Module, device: torch.device) -> nn.Module:
    """Give the layers of a network on a CPU classes that train faster; the same object."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return network
    for module in network.modules():
        # Not of subclasses, which may do something else.
        module.__class__ = FASTER.get(type(module), type(module))
        # diffusers need not be installed.
        if type(module).__name__ == "Upsample2D" and type(module).__module__.startswith("diffusers."):
            from .upsampling import QuickUpsample

            module.__class__ = QuickUpsample
    return network
