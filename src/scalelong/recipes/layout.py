"""The order in which a network's weights and images lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import TrainingConfig

SMALL_IMAGE = 20_480
"""One image of up to so many numbers torch convolves by itself, with any number of threads."""


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
    """A convolution that brings its input into the layout of its weight, and draws alike with any number of threads.

    torch brings the weight into the layout of the input, at every call and once more for the gradient, and the weight's
    gradient back. Behind an attention all of a UNet's planes come with their channels last: 3 % of a training step.

    Kernels of one pixel it takes to oneDNN or to MKL, which add in another order, by the number of threads.
    """

    def forward(self, input: Tensor) -> Tensor:
        input = input.contiguous() if has_planes(self.weight) else input
        if torch.is_grad_enabled() or not self._is_chosen_by_threads(input):
            return super().forward(input)
        # Where torch goes itself with more than one thread.
        return torch.mkldnn_convolution(input, self.weight, self.bias, (0, 0), self.stride, self.dilation, self.groups)

    def _is_chosen_by_threads(self, input: Tensor) -> bool:
        is_pixel = self.kernel_size == (1, 1) and self.padding in (0, (0, 0)) and input.ndim == 4
        if not is_pixel or input.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
            return False
        # Compiled code has its own ways.
        if torch.compiler.is_compiling() or not torch.backends.mkldnn.is_available():
            return False
        return len(input) > 1 or input.numel() > SMALL_IMAGE


def has_planes(weight: Tensor) -> bool:
    """Whether the numbers of a channel lie together, and not those of a pixel; kernels of one pixel are both."""
    return weight.is_contiguous() and not weight.is_contiguous(memory_format=torch.channels_last)
