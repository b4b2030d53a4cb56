"""The order in which a network's weights and images lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .config import TrainingConfig
from .steady import SteadyBlock, SteadyLinear, has_planes, make_steady


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
    """The network as a CPU draws fastest inside a `with`: its channels last, the weights of linear layers packed.

    Its weights must not change in there; inside another such `with` it does nothing.
    """
    modules = list(network.modules())
    if any(module.draws for module in modules if isinstance(module, SteadyLinear)):
        yield
        return
    whole = [weight for weight in network.parameters() if is_whole(weight)]
    kernels = [weight for weight in whole if weight.ndim == 4 and has_planes(weight)]
    linears = [module for module in modules if isinstance(module, SteadyLinear) and is_whole(module.weight)]
    blocks = [module for module in modules if isinstance(module, SteadyBlock)]
    planes = [kernel.data for kernel in kernels]
    try:
        for linear in linears:
            linear.draws = True
        for block in blocks:
            block.begin_drawing()
        for kernel in kernels:
            kernel.data = kernel.data.contiguous(memory_format=torch.channels_last)
        yield
    finally:
        for kernel, before in zip(kernels, planes, strict=True):
            kernel.data = before
        for linear in linears:
            linear.draws, linear.packed = False, None
        for block in blocks:
            block.end_drawing()


def is_whole(weight: Tensor) -> bool:
    """Whether a weight is all on this process's CPU: shards are another type."""
    return type(weight) is nn.Parameter and weight.is_cpu
