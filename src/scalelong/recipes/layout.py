"""The order in which a network's weights and images lie in memory."""

from __future__ import annotations

import torch
from torch import nn

from .config import TrainingConfig
from .steady import make_steady


def lay_out(network: nn.Module, config: TrainingConfig) -> nn.Module:
    """The network, on its device, in the memory layout of its recipe and with steady layers; the same object."""
    device = next(network.parameters()).device
    if device.type == "cpu":
        make_steady(network)
    layout = torch.channels_last if has_channels_last(config, device) else torch.preserve_format
    return network.to(memory_format=layout)  # pyright: ignore[reportCallIssue]


def has_channels_last(config: TrainingConfig, device: torch.device) -> bool:
    """Whether convolutions keep the channels of a pixel together: GPUs are faster so, CPUs with whole planes."""
    return device.type == "cuda" if config.channels_last == "auto" else config.channels_last
