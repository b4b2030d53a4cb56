"""Enlarging images through fewer products."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from ...recipes.steady.layers import SteadyConv2d, has_hooks, has_planes

FEWEST_PIXELS = 1024
"""Of fewer in a batch, the larger kernel may take longer to make than it saves, in bf16 above all."""


class QuickUpsample(Upsample2D):
    """Doubles the size of images and convolves them in 16 products a pixel instead of 36, while it trains.

    Each of the 3×3 numbers of a kernel meets every pixel up to four times: added up before, they are the kernel of a
    transposed convolution with stride 2, which is the same but for rounding.
    """

    def forward(self, hidden_states: Tensor, output_size: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        # Sizes are looked at last: compiled code would be made anew for others.
        if args or kwargs or not (trains(hidden_states) and self._is_plain and pays(hidden_states, output_size)):
            return super().forward(hidden_states, output_size, *args, **kwargs)
        convolution: Any = self.conv
        images = hidden_states.contiguous() if has_planes(convolution.weight) else hidden_states
        return F.conv_transpose2d(images, doubled(convolution.weight), convolution.bias, stride=2, padding=1)

    @property
    def _is_plain(self) -> bool:
        """Whether nothing but a 3×3 convolution follows the doubling, and nobody watches it."""
        convolution: Any = self.conv if self.name == "conv" else None
        if self.norm is not None or not self.interpolate or type(convolution) not in (nn.Conv2d, SteadyConv2d):
            return False
        shape = convolution.kernel_size, convolution.stride, convolution.padding, convolution.dilation
        plain = convolution.groups == 1 and convolution.padding_mode == "zeros" and not has_hooks(convolution)
        return plain and shape == ((3, 3), (1, 1), (1, 1), (1, 1))


def trains(images: Tensor) -> bool:
    # Compiled code has its own ways with images.
    return not torch.compiler.is_compiling() and images.is_cpu and torch.is_grad_enabled()


def pays(images: Tensor, output_size: Any) -> bool:
    """Whether the images are doubled, and have many pixels."""
    count, _, *sizes = images.shape
    doubles = output_size is None or output_size == tuple(2 * size for size in sizes)
    return doubles and count * math.prod(sizes) >= FEWEST_PIXELS


def doubled(kernel: Tensor) -> Tensor:
    """The kernel of the transposed convolution. Shape: (E, D, 3, 3) → (D, E, 4, 4)."""
    outputs, inputs = kernel.shape[:2]
    # Which of a kernel's three numbers in a line meet a pixel where it is doubled.
    line = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=kernel.dtype, device=kernel.device)
    with torch.autocast("cpu", enabled=False):
        rows = kernel.transpose(0, 1).reshape(-1, 9)
        return (rows @ torch.kron(line, line).mT).view(inputs, outputs, 4, 4)
