"""The order in which a network's weights and images lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .config import TrainingConfig
from .steady import has_planes, make_steady


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
    """The network with its channels last inside a `with`: a CPU draws faster so, and trains faster with planes."""
    # Not of shards, which are another type.
    weights = [weight for weight in network.parameters() if type(weight) is nn.Parameter and weight.is_cpu]
    kernels = [weight for weight in weights if weight.ndim == 4 and has_planes(weight)]
    for kernel in kernels:
        kernel.data = kernel.data.contiguous(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for kernel in kernels:
            kernel.data = kernel.data.contiguous()
