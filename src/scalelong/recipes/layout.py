"""The order in which a network's weights and images lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from .config import TrainingConfig
from .steady import make_steady
from .steady.layers import Draws, has_planes, is_whole


def lay_out(network: nn.Module, config: TrainingConfig) -> nn.Module:
    """The network, on its device, in the memory layout of its recipe and with steady layers; the same object."""
    device = next(network.parameters()).device
    if device.type == "cpu":
        make_steady(network)
    layout = torch.channels_last if has_channels_last(config, device) else torch.preserve_format
    return network.to(memory_format=layout)  # pyright: ignore[reportCallIssue]


def has_channels_last(config: TrainingConfig, device: torch.device) -> bool:
    """Whether a network trains with the channels of a pixel together: GPUs are faster so, CPUs with whole planes."""
    return device.type == "cuda" if config.channels_last == "auto" else config.channels_last


@contextmanager
def for_drawing(network: nn.Module) -> Iterator[None]:
    """The network as a CPU draws fastest inside a `with`: its channels last, its weights packed.

    Its weights must not change in there; inside another such `with` it does nothing.
    """
    # Parts come before what they are in.
    modules = [module for module in network.modules() if isinstance(module, Draws)][::-1]
    if any(module.draws for module in modules):
        yield
        return
    kernels = [each for each in network.parameters() if each.ndim == 4 and is_whole(each) and has_planes(each)]
    planes = [kernel.data for kernel in kernels]
    try:
        for kernel in kernels:
            kernel.data = kernel.data.contiguous(memory_format=torch.channels_last)
        for module in modules:
            module.begin_drawing()
        yield
    finally:
        for module in modules:
            module.end_drawing()
        for kernel, before in zip(kernels, planes, strict=True):
            kernel.data = before


def without_gradients(network: nn.Module) -> AbstractContextManager[None]:
    """Nothing in it is noted for gradients, nor could be later, which is 3 % of the time that a small network draws.

    Shards keep the weights that they gather, and could not train with them afterwards.
    """
    return torch.inference_mode() if all(map(is_whole, network.parameters())) else torch.no_grad()
