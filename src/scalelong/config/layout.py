"""Where a network's weights and images lie in memory."""

from __future__ import annotations

import torch
from torch import nn

from .schema import TrainingConfig


def lay_out(network: nn.Module, config: TrainingConfig, device: torch.device | str) -> nn.Module:
    """The network on a device, in the memory layout of its recipe; the same object."""
    device = torch.device(device)
    layout = torch.channels_last if has_channels_last(config, device) else torch.preserve_format
    return network.to(device, memory_format=layout)  # pyright: ignore[reportCallIssue]


def has_channels_last(config: TrainingConfig, device: torch.device) -> bool:
    """Whether a network trains with the channels of a pixel together: by itself on GPUs alone."""
    return device.type == "cuda" if config.channels_last == "auto" else config.channels_last
