"""Layers that give the same bits with any number of threads, where images are drawn.

On a CPU torch's choice of kernels, and the places where it cuts the work for its threads, depend on their number. What
is drawn must not: `torchrun` gives a process one thread, and a process by itself takes all cores.
"""

from __future__ import annotations

import math
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.uvit import MLP, SHORT, Attention, Block

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
CAN_PACK = platform.machine() in ("x86_64", "AMD64")
"""With the libraries for other processors it was not tried."""
LARGE_PLANE = 1024
"""From so many pixels on, torch cuts images with their channels last for its threads to norm them."""
SMALL_PLANE, FEW_CHANNELS = 64, 2
"""From so many pixels on, and up to so many channels in a group, smaller images are normed faster as planes."""
SHARE = 32_768
"""A thread gets at least so many numbers of an element-wise function."""
VECTOR = 64
"""A multiple of the numbers that are computed at once."""


def make_steady(network: nn.Module) -> nn.Module:
    """Make layers steady, whose names, parameters and, with gradients, results stay theirs; the same object."""
    for module in network.modules():
        # Not of subclasses, which may do something else.
        if type(module) in STEADY:
            module.__class__ = STEADY[type(module)]
        # Of diffusers, which need not be installed.
        elif type(module).__name__ == "GEGLU":
            module.gelu = gelu  # pyright: ignore[reportArgumentType]
        elif type(module).__name__ == "ResnetBlock2D" and type(module.nonlinearity) in (nn.SiLU, SteadySiLU):
            # Its own: early versions share one activation among all modules.
            module.nonlinearity = NormedSiLU()
    return network


def must_be_steady(input: Tensor) -> bool:
    """Whether a result may not depend on the threads: without gradients; compiled code has its own ways."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return input.is_cpu and input.dtype is torch.float32 and torch.backends.mkldnn.is_available()


def has_planes(weight: Tensor) -> bool:
    """Whether the numbers of a channel lie together, and not those of a pixel; kernels of one pixel are both."""
    return weight.is_contiguous() and not weight.is_contiguous(memory_format=torch.channels_last)


class SteadyConv2d(nn.Conv2d):
    """A convolution whose kernels of one pixel always go to oneDNN, and that keeps to the layout of its weight.

    With one thread and few images torch asks MKL. As to the layout, it brings the weight into that of the input, at
    every call and once more for the gradient, and the weight's gradient back: behind an attention all of a UNet's
    planes come with their channels last, which cost 3 % of a training step.
    """

    def forward(self, input: Tensor) -> Tensor:
        input = input.contiguous() if has_planes(self.weight) else input
        if self._is_chosen_by_threads(input) and must_be_steady(input):
            weight, bias = self.weight, self.bias
            return torch.mkldnn_convolution(input, weight, bias, (0, 0), self.stride, self.dilation, self.groups)
        return super().forward(input)

    def _is_chosen_by_threads(self, input: Tensor) -> bool:
        is_pixel = self.kernel_size == (1, 1) and self.padding in (0, (0, 0)) and input.ndim == 4
        return is_pixel and (len(input) > 1 or input.numel() > SMALL_IMAGE)


class SteadyLinear(nn.Linear):
    """A linear layer that draws with oneDNN where MKL depends on the threads or is slower; else it is torch's own.

    Few rows, such as times, are taken for pixels; for large products the weight is packed.
    """

    draws = False
    """Whether images are drawn; until it is set again the weight stays as it is."""
    packed: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.draws:
            # The question comes last, as it takes longer than the sizes: with one image that is a percent of the time.
            if self.in_features < input.numel() < FEW_ROWS * self.in_features and must_be_steady(input):
                return self.as_pixels(input)
            if input.numel() // self.in_features >= self.fewest_packed and must_be_steady(input):
                return self.through(input)
        return F.linear(input, self.weight, self.bias)

    def as_pixels(self, input: Tensor) -> Tensor:
        rows = input.reshape(1, 1, -1, self.in_features).permute(0, 3, 1, 2)
        output = torch.mkldnn_convolution(rows, self.weight[:, :, None, None], self.bias, (0, 0), (1, 1), (1, 1), 1)
        return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], self.out_features)

    @property
    def fewest_packed(self) -> float:
        """Rows from which on a product is large, and none of its sums shared out among oneDNN's threads."""
        if not CAN_PACK:
            return math.inf
        whole = 0 if self.in_features <= WHOLE_SUM else WHOLE_SUM // 2 * self.in_features / self.out_features
        return max(LARGE_PRODUCT / self.weight.numel(), whole)

    def through(self, input: Tensor, function: str = "none") -> Tensor:
        """The product with the packed weight, of which an element-wise function is taken in passing."""
        return torch.ops.mkldnn._linear_pointwise.default(input, self._packed_weight(), self.bias, function, [], "none")

    def onto(self, sum: Tensor, input: Tensor) -> Tensor:
        """The product with the packed weight, to which a sum is added in passing."""
        return torch.ops.mkldnn._linear_pointwise.binary(input, sum, self._packed_weight(), self.bias, "add")

    def _packed_weight(self) -> Tensor:
        packed = self.packed
        if packed is None:
            packed = self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACKED_ROWS)
        return packed


class SteadyMLP(MLP):
    """Two linear layers, whose GELU oneDNN takes in passing where the first one is packed."""

    def forward(self, x: Tensor) -> Tensor:
        first, rows = self.fc1, x.numel() // x.shape[-1]
        if isinstance(first, SteadyLinear) and first.draws and rows >= first.fewest_packed and must_be_steady(x):
            return self.fc2(first.through(x, "gelu"))
        return super().forward(x)


class SteadyAttention(Attention):
    """Attention over few tokens in four calls, each of them for all heads: with few images calls take the time."""

    def attend(self, heads: Tensor) -> Tensor:
        if heads.shape[-2] > SHORT or not must_be_steady(heads):
            return super().attend(heads)
        query, key, value = heads.flatten(1, 2).unbind()
        scores = torch.baddbmm(heads.new_empty(()), query, key.mT, beta=0, alpha=heads.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(dim=-1), value).view(heads.shape[1:])


class SteadyBlock(Block):
    """A block that draws in few calls: it computes what its modules would, and adds its input in passing."""

    fewest_rows = math.inf
    """Rows from which on it draws so."""

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if x.numel() // x.shape[-1] < self.fewest_rows or not must_be_steady(x):
            return super().forward(x, skip)
        attention: Any = self.attn
        mlp: Any = self.mlp
        x = self.join(x, skip)
        x = attention.proj.onto(x, attention.mix(attention.qkv.through(normed(x, self.norm1))))
        return mlp.fc2.onto(x, mlp.fc1.through(normed(x, self.norm2), "gelu"))

    def begin_drawing(self) -> None:
        """Draw in few calls from now on, if its modules would do the same and tell nobody; they draw already."""
        own = [module for module in self.modules() if module is not self]
        if all(is_known(module) and not has_hooks(module) for module in own):
            self.fewest_rows = max(module.fewest_packed for module in own if isinstance(module, SteadyLinear))

    def end_drawing(self) -> None:
        self.fewest_rows = math.inf


def is_known(module: nn.Module) -> bool:
    if isinstance(module, SteadyLinear):
        return module.draws
    return isinstance(module, SteadyMLP | SteadyAttention) or type(module) in (nn.LayerNorm, nn.GELU)


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return torch.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class SteadyGroupNorm(nn.GroupNorm):
    """A norm for which no image is cut, so that one thread sums it up; images that fill up are left out again.

    Images whose channels come last are cut where the threads' equal shares of all pixels end, and summed up by parts.
    Small ones are not, but torch sums up groups of few channels number by number then: planes are faster, and copies.
    """

    def forward(self, input: Tensor) -> Tensor:
        # In this order: what is compiled must not come to the number of threads, at which it would break off.
        if not must_be_steady(input) or input.ndim != 4 or input.is_contiguous():
            return super().forward(input)
        if input[0, 0].numel() < LARGE_PLANE:
            return self._by_planes(input)
        missing = -len(input) % torch.get_num_threads()
        if missing == 0:
            return super().forward(input)
        return super().forward(torch.cat([input, *[input[:1]] * missing]))[: len(input)]

    def _by_planes(self, input: Tensor) -> Tensor:
        if self.num_channels > FEW_CHANNELS * self.num_groups or input[0, 0].numel() < SMALL_PLANE:
            return super().forward(input)
        return super().forward(input.contiguous()).contiguous(memory_format=torch.channels_last)


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


STEADY: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: SteadyConv2d,
    nn.Linear: SteadyLinear,
    nn.GroupNorm: SteadyGroupNorm,
    nn.SiLU: SteadySiLU,
    MLP: SteadyMLP,
    Attention: SteadyAttention,
    Block: SteadyBlock,
}
