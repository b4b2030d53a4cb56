"""Layers that give the same bits with any number of threads, where images are drawn, and draw them fast.

On a CPU torch's choice of kernels, and the places where it cuts the work for its threads, depend on their number. What
is drawn must not: `torchrun` gives a process one thread, and a process by itself takes all cores.
"""

from __future__ import annotations

from torch import nn

from ...models.uvit import MLP, Attention, Block
from .layers import NormedSiLU, SteadyConv2d, SteadyGroupNorm, SteadyLinear, SteadySiLU, gelu
from .uvit import SteadyAttention, SteadyBlock, SteadyMLP

STEADY: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: SteadyConv2d,
    nn.Linear: SteadyLinear,
    nn.GroupNorm: SteadyGroupNorm,
    nn.SiLU: SteadySiLU,
    MLP: SteadyMLP,
    Attention: SteadyAttention,
    Block: SteadyBlock,
}


def make_steady(network: nn.Module) -> nn.Module:
    """Make layers steady, whose names, parameters and, with gradients, results stay theirs; the same object."""
    for module in network.modules():
        # Not of subclasses, which may do something else.
        if type(module) in STEADY:
            module.__class__ = STEADY[type(module)]
        elif type(module).__module__.startswith("diffusers."):
            make_part_steady(module)
    return network


def make_part_steady(module: nn.Module) -> None:
    """The same for one of diffusers' own modules; it need not be installed."""
    kind = type(module).__name__
    if kind == "GEGLU":
        module.gelu = gelu  # pyright: ignore[reportArgumentType]
    # Activations of their own: early versions share one among all modules.
    elif kind == "ResnetBlock2D" and type(module.nonlinearity) in (nn.SiLU, SteadySiLU):
        from .unet import SteadyResnet

        module.__class__ = SteadyResnet
        module.nonlinearity = NormedSiLU()
    elif kind == "Attention" and type(module).__module__ == "diffusers.models.attention_processor":
        from .unet import SteadyImageAttention

        module.__class__ = SteadyImageAttention
    elif kind.startswith("UNet2D") and type(getattr(module, "conv_act", None)) in (nn.SiLU, SteadySiLU):
        module.conv_act = NormedSiLU()
