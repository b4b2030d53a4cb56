"""The order in which a network's weights and images lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import TrainingConfig


def lay_out(network: nn.Module, config: TrainingConfig) -> nn.Module:
    """The network, on its device, in the memory layout of its recipe; the same object."""
    device = next(network.parameters()).device
    if device.type == "cpu":
        for module in network.modules():
            if type(module) is nn.Conv2d:
                module.__class__ = KeptConv2d
    layout = torch.channels_last if has_channels_last(config, device) else torch.preserve_format
    return network.to(memory_format=layout)  # pyright: ignore[reportCallIssue]


def has_channels_last(config: TrainingConfig, device: torch.device) -> bool:
    """Whether convolutions keep the channels of a pixel together: GPUs are faster so, CPUs with whole planes."""
    return device.type == "cuda" if config.channels_last == "auto" else config.channels_last


class KeptConv2d(nn.Conv2d):
    """A convolution that brings its input into the layout of its weight.

    torch brings the weight into that of the input, at every call and once more for the gradient, and the weight's
    gradient back. Behind an attention all of a UNet's planes come with their channels last: 3 % of a training step.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.contiguous() if has_planes(self.weight) else input)


def has_planes(weight: Tensor) -> bool:
    """Whether the numbers of a channel lie together, and not those of a pixel; kernels of one pixel are both."""
    return weight.is_contiguous() and not weight.is_contiguous(memory_format=torch.channels_last)
