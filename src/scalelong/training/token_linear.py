"""Linear layers that train faster on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# From here on a step is faster with the convolution.
FEWEST_TOKENS, FEWEST_PRODUCTS = 256, 2**26


def take_tokens_as_pixels(network: nn.Module) -> nn.Module:
    """Make linear layers on a CPU `TokenLinear`s, whose names, parameters and results are theirs; the same object."""
    for module in network.modules():
        # Not of subclasses, which may do something else.
        if type(module) is nn.Linear and module.weight.is_cpu and torch.backends.mkldnn.is_available():
            module.__class__ = TokenLinear
    return network


class TokenLinear(nn.Linear):
    """A linear layer that trains on many tokens as the pixels of one image, as a 1×1 convolution.

    For matrix products of float32 torch asks MKL, for convolutions oneDNN, which reaches more of the peak and adds the
    bias in passing. No tensor is copied: tokens one after the other are an image whose channels vary fastest.

    Without gradients it is a plain linear layer: what is drawn and measured must not depend on the number of threads,
    and with one thread torch does not ask oneDNN.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self._is_faster_as_convolution(input)):
            return super().forward(input)
        # Through a matrix, for an axis of one may have any stride, and would hide the order of the channels.
        pixels = input.view(-1, self.in_features).view(1, *input.shape).permute(0, 3, 1, 2)
        output = F.conv2d(pixels, self.weight[:, :, None, None], self.bias)
        return output.permute(0, 2, 3, 1).squeeze(0)

    def _is_faster_as_convolution(self, input: Tensor) -> bool:
        # Compiled code has its own ways with matrix products; those of bf16 go to oneDNN anyway.
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or torch.get_num_threads() == 1:
            return False
        if input.ndim != 3 or input.dtype is not torch.float32 or not (input.is_cpu and input.is_contiguous()):
            return False
        tokens = input.shape[0] * input.shape[1]
        return tokens >= FEWEST_TOKENS and tokens * self.weight.numel() >= FEWEST_PRODUCTS
