"""torch's own layers, steady where images are drawn."""

from __future__ import annotations

import math
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL_IMAGE = 20_480
"""One image of up to so many numbers torch convolves by itself, with any number of threads."""
FEW_ROWS = 32
"""Of more, products were seen to depend on the threads in rare cases only."""
LARGE_PRODUCT = 2**23
"""Multiplications from which on oneDNN gains more than a call of it costs."""
PACKED_ROWS = 128
"""Rows that weights are packed for; with more it was as fast."""
WHOLE_SUM = 1024
"""Longer sums oneDNN shares out among threads, unless there are many of them: enough for 64 threads."""
CAN_PACK = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
"""With the libraries for other processors it was not tried."""
ADD = ("add", None, None, [], None)
"""What a convolution does with a sum, and that nothing follows."""
LARGE_PLANE = 1024
"""From so many pixels on, torch cuts images with their channels last for its threads to norm them."""
FEW_CHANNELS = 4
"""Up to so many channels in a group torch sums up smaller images number by number."""
MANY_GROUPS = 2**14
"""Pixels times groups from which on a few calls for all of them are faster than that."""
SHARE = 32_768
"""A thread gets at least so many numbers of an element-wise function."""
VECTOR = 64
"""A multiple of the numbers that are computed at once."""


def must_be_steady(input: Tensor) -> bool:
    """Whether a result may not depend on the threads: without gradients; compiled code has its own ways."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return input.is_cpu and input.dtype is torch.float32 and torch.backends.mkldnn.is_available()


def is_whole(weight: Tensor) -> bool:
    """Whether a weight is all on this process's CPU: shards are another type."""
    return type(weight) is nn.Parameter and weight.is_cpu


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to know when the module is called, or its gradient, or does something else instead."""
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def has_planes(weight: Tensor) -> bool:
    """Whether the numbers of a channel lie together, and not those of a pixel; kernels of one pixel are both."""
    return weight.is_contiguous() and not weight.is_contiguous(memory_format=torch.channels_last)


class Draws(nn.Module):
    """A layer or block that takes other ways while images are drawn, and its weights do not change."""

    draws = False

    def begin_drawing(self) -> None:
        """Take them from now on, where it can; what is in it does already."""
        raise NotImplementedError

    def end_drawing(self) -> None:
        self.draws = False


class Packs(Draws):
    """A layer whose weight oneDNN packs for its products, once for all that is drawn."""

    packed: tuple[Any, ...] | None = None
    """The weight and all else that its product depends on, at hand: a module finds what it has by name."""

    def end_drawing(self) -> None:
        self.draws, self.packed = False, None


class SteadyConv2d(Packs, nn.Conv2d):
    """A convolution that draws with oneDNN, and otherwise keeps to the layout of its weight.

    With one thread and few images torch asks MKL for kernels of one pixel. As to the layout, it brings the weight into
    that of the input, at every call and once more for the gradient, and the weight's gradient back: behind an attention
    all of a UNet's planes come with their channels last, which cost 3 % of a training step.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.draws and input.ndim == 4 and must_be_steady(input):
            return self.through(input)
        input = input.contiguous() if has_planes(self.weight) else input
        if self._is_chosen_by_threads(input) and must_be_steady(input):
            weight, bias = self.weight, self.bias
            return torch.mkldnn_convolution(input, weight, bias, (0, 0), self.stride, self.dilation, self.groups)
        return super().forward(input)

    def begin_drawing(self) -> None:
        known = self.groups == 1 and self.padding_mode == "zeros" and not isinstance(self.padding, str)
        self.draws = CAN_PACK and known and is_whole(self.weight)

    def through(self, input: Tensor) -> Tensor:
        """The images convolved with the packed weight."""
        return torch.ops.mkldnn._convolution_pointwise.default(input, *self.pack(input), "none", [], "")

    def onto(self, sum: Tensor, input: Tensor) -> Tensor:
        """The same, to which a sum is added in passing."""
        return torch.ops.mkldnn._convolution_pointwise.binary(input, sum, *self.pack(input), *ADD)

    def into(self, sum: Tensor, input: Tensor) -> Tensor:
        """The same, in the place of the sum."""
        return torch.ops.mkldnn._convolution_pointwise_.binary(sum, input, *self.pack(input), *ADD)

    def pack(self, input: Tensor) -> tuple[Any, ...]:
        packed = self.packed
        if packed is None:
            # For images of this size; other sizes cost no more than a weight that is not packed.
            settings = self.padding, self.stride, self.dilation, self.groups
            weight = torch.ops.mkldnn._reorder_convolution_weight(self.weight.detach(), *settings, input.shape)
            packed = self.packed = (weight, self.bias, *settings)
        return packed

    def _is_chosen_by_threads(self, input: Tensor) -> bool:
        is_pixel = self.kernel_size == (1, 1) and self.padding in (0, (0, 0)) and input.ndim == 4
        return is_pixel and (len(input) > 1 or input.numel() > SMALL_IMAGE)


class SteadyLinear(Packs, nn.Linear):
    """A linear layer that draws with oneDNN where MKL depends on the threads or is slower; else it is torch's own.

    Few rows, such as times, are taken for pixels; for large products the weight is packed.
    """

    fewest_packed = math.inf
    """Rows from which on a product is large, and none of its sums shared out among oneDNN's threads."""

    def forward(self, input: Tensor) -> Tensor:
        if self.draws:
            # The question comes last, as it takes longer than the sizes: with one image that is a percent of the time.
            if self.in_features < input.numel() < FEW_ROWS * self.in_features and must_be_steady(input):
                return self.as_pixels(input)
            if input.numel() // self.in_features >= self.fewest_packed and must_be_steady(input):
                return self.through(input)
        return F.linear(input, self.weight, self.bias)

    def begin_drawing(self) -> None:
        self.draws = is_whole(self.weight)
        if self.draws and CAN_PACK:
            whole = 0 if self.in_features <= WHOLE_SUM else WHOLE_SUM // 2 * self.in_features / self.out_features
            self.fewest_packed = max(LARGE_PRODUCT / self.weight.numel(), whole)

    def as_pixels(self, input: Tensor) -> Tensor:
        rows = input.reshape(1, 1, -1, self.in_features).permute(0, 3, 1, 2)
        output = torch.mkldnn_convolution(rows, self.weight[:, :, None, None], self.bias, (0, 0), (1, 1), (1, 1), 1)
        return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], self.out_features)

    def through(self, input: Tensor, function: str = "none") -> Tensor:
        """The product with the packed weight, of which an element-wise function is taken in passing."""
        return product(input, self.pack(), function)

    def pack(self) -> tuple[Any, ...]:
        packed = self.packed
        if packed is None:
            weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACKED_ROWS)
            packed = self.packed = (weight, self.bias)
        return packed


def product(input: Tensor, packed: tuple[Any, ...], function: str = "none") -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(input, *packed, function, [], "none")


def product_onto(sum: Tensor, input: Tensor, packed: tuple[Any, ...]) -> Tensor:
    """The product, to which a sum is added in passing."""
    return torch.ops.mkldnn._linear_pointwise.binary(input, sum, *packed, "add")


class SteadyGroupNorm(nn.GroupNorm):
    """A norm for which no image is cut, so that one thread sums it up; images that fill up are left out again.

    Images whose channels come last are cut where the threads' equal shares of all pixels end, and summed up by parts.
    Small ones are not, but torch sums up groups of few channels number by number then: pixel by pixel is faster.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim == 3 and input.is_cpu and not torch.compiler.is_compiling():
            return self._before_attention(input)
        # In this order: what is compiled must not come to the number of threads, at which it would break off.
        if not must_be_steady(input) or input.ndim != 4 or input.is_contiguous():
            return super().forward(input)
        if input[0, 0].numel() < LARGE_PLANE:
            return self.by_pixels(input) if self._has_small_groups(input) else super().forward(input)
        missing = -len(input) % torch.get_num_threads()
        if missing == 0:
            return super().forward(input)
        return super().forward(torch.cat([input, *[input[:1]] * missing]))[: len(input)]

    def _before_attention(self, input: Tensor) -> Tensor:
        """The norm of pixels that become tokens, and lie so: else three layers copy them. Shape: (B, C, L)."""
        if must_be_steady(input) and not input.is_contiguous():
            return self.forward(input.unsqueeze(-1)).squeeze(-1)
        return super().forward(input).mT.contiguous().mT

    def by_pixels(self, input: Tensor) -> Tensor:
        """The norm from sums over all pixels, for every channel, of which there are few. Shape: (B, C, H, W)."""
        pixels, groups = input.permute(0, 2, 3, 1), self.num_groups
        squares = pixels * pixels
        sums = torch.stack([pixels.sum((1, 2)), squares.sum((1, 2))]).view(2, len(input), groups, -1)
        mean, square = sums.sum(-1, keepdim=True) / (input[0].numel() // groups)
        deviation = (square - mean * mean).clamp_min_(0).add_(self.eps).sqrt_()
        scale = self.weight.view(groups, -1) / deviation
        shift = torch.addcmul(self.bias.view(groups, -1), mean, scale, value=-1)
        scale, shift = (each.view(len(input), 1, 1, -1) for each in (scale, shift))
        return torch.addcmul(shift, pixels, scale, out=squares).permute(0, 3, 1, 2)

    def _has_small_groups(self, input: Tensor) -> bool:
        channels = self.num_channels // self.num_groups
        return self.affine and channels <= FEW_CHANNELS and input.numel() >= MANY_GROUPS * channels


class SteadySiLU(nn.SiLU):
    """x·sigmoid(x) in whole vectors: what is left over at the end of a thread's share is rounded otherwise."""

    def forward(self, input: Tensor) -> Tensor:
        if self.inplace or not must_be_steady(input):
            return super().forward(input)
        input, overwrites = in_one_piece(input), self.overwrites(input)
        whole = shared_evenly(input.numel(), torch.get_num_threads())
        if whole == input.numel():
            return F.silu(input, inplace=overwrites)
        output = input if overwrites else torch.empty_like(input)
        for part in (slice(whole), slice(whole, None)):
            torch.ops.aten.silu.out(in_memory(input)[part], out=in_memory(output)[part])
        return output

    def overwrites(self, input: Tensor) -> bool:
        """Whether the output may take the place of the input."""
        return False


class NormedSiLU(SteadySiLU):
    """That of diffusers' residual blocks, which overwrites images: they come from a norm and nobody else reads them.

    The times, which it gets as well, are those of all blocks.
    """

    def overwrites(self, input: Tensor) -> bool:
        return input.ndim == 4


def shared_evenly(count: int, threads: int) -> int:
    """How many of so many numbers all threads share in whole vectors, so few left that one thread takes them.

    >>> shared_evenly(100_000, 1), shared_evenly(100_000, 3)
    (100000, 99840)
    """
    parts = min(threads, -(-count // SHARE))
    if parts < 2:
        return count
    # With fewer than the second there were one part less, and its shares would be others.
    return max(count - count % (parts * VECTOR), (parts - 1) * SHARE)


def gelu(gate: Tensor) -> Tensor:
    """GELU(x), for which oneDNN takes tensors in one piece; torch's own rounds what is left over otherwise."""
    return F.gelu(gate.contiguous() if must_be_steady(gate) else gate)


def in_one_piece(input: Tensor) -> Tensor:
    """The tensor, or a copy, without gaps, in one of two layouts."""
    last = input.ndim == 4 and input.is_contiguous(memory_format=torch.channels_last)
    return input if last else input.contiguous()


def in_memory(input: Tensor) -> Tensor:
    """The numbers of a tensor without gaps as they lie. Shape: (...) → (n,)."""
    return input.as_strided((input.numel(),), (1,))
