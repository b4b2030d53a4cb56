"""Linear layers through oneDNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...recipes.steady.layers import CAN_PACK, SteadyLinear, has_hooks, product
from ...recipes.steady.uvit import SteadyMLP

# From here on a step is faster with the convolution.
FEWEST_TOKENS, FEWEST_PRODUCTS = 256, 2**26


class TokenLinear(SteadyLinear):
    """A linear layer that trains on many tokens as the pixels of one image, as a 1×1 convolution.

    For matrix products of float32 torch asks MKL, for convolutions oneDNN, which reaches more of the peak; it adds the
    bias in passing, which bf16 gains from. While images are drawn it is that of every network.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self._is_faster_as_convolution(input)):
            return super().forward(input)
        tokens, weight, bias = autocast(input.reshape(-1, self.in_features).contiguous(), self.weight, self.bias)
        output: Any = ConvolvedTokens.apply(tokens, weight, bias)
        return output.view(*input.shape[:-1], self.out_features)

    def _is_faster_as_convolution(self, input: Tensor) -> bool:
        # Compiled code has its own ways with matrix products.
        if torch.compiler.is_compiling() or torch.get_num_threads() == 1:
            return False
        if not input.is_cpu or not all(tensor.dtype is torch.float32 for tensor in (input, self.weight)):
            return False
        tokens = input.numel() // self.in_features
        return tokens >= FEWEST_TOKENS and tokens * self.weight.numel() >= FEWEST_PRODUCTS


class TokenMLP(SteadyMLP):
    """Two linear layers that train as convolutions, and whose GELU overwrites a gradient that nobody else has."""

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self._is_faster_as_one(x)):
            return super().forward(x)
        first, second = self.fc1, self.fc2
        tokens = x.reshape(-1, first.in_features).contiguous()
        output: Any = ConvolvedMLP.apply(*autocast(tokens, first.weight, first.bias, second.weight, second.bias))
        return output.view(*x.shape[:-1], second.out_features)

    def _is_faster_as_one(self, x: Tensor) -> bool:
        first, activation, second = self.fc1, self.act, self.fc2
        if not isinstance(first, TokenLinear) or not isinstance(second, TokenLinear):
            return False
        if type(activation) is not nn.GELU or any(map(has_hooks, (first, activation, second))):
            return False
        tokens = x.numel() // first.in_features
        return first._is_faster_as_convolution(x) and tokens * second.weight.numel() >= FEWEST_PRODUCTS


class ConvolvedTokens(torch.autograd.Function):
    """x·Wᵀ + b. Shapes: x (T, D), W (E, D), b (E) → (T, E)."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return convolve(tokens, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        return backward(gradients[0], tokens, weight, ctx.needs_input_grad)


class ConvolvedMLP(torch.autograd.Function):
    """GELU(x·Vᵀ + a)·Wᵀ + b. Shapes: x (T, D), V (E, D), a (E), W (F, E), b (F) → (T, F)."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, first: Tensor, a: Tensor | None, second: Tensor, b: Tensor | None) -> Tensor:
        hidden = convolve(tokens, first, a)
        active = F.gelu(hidden)
        ctx.save_for_backward(tokens, first, a, hidden, active, second, b)
        return convolve(active, second, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        tokens, first, a, hidden, active, second, b = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # The gradient's own derivative is wanted too, which torch knows of the plain form.
            given = [tensor for tensor, asked in zip((tokens, first, a, second, b), wanted, strict=True) if asked]
            plain = F.linear(F.gelu(F.linear(tokens, first, a)), second, b)
            found = iter(torch.autograd.grad(plain, given, gradients[0], create_graph=True))
            return tuple(next(found) if asked else None for asked in wanted)
        above, for_second, for_b = backward(gradients[0], active, second, (True, *wanted[3:]))
        if is_batch(above):
            above = torch.ops.aten.gelu_backward(above, hidden)
        else:
            torch.ops.aten.gelu_backward.grad_input(above, hidden, grad_input=above)
        return *backward(above, tokens, first, wanted[:3]), for_second, for_b


def convolve(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return as_tokens(F.conv2d(as_pixels(tokens), as_kernel(weight), bias))


def backward(gradient: Any, tokens: Tensor, weight: Tensor, wanted: Sequence[bool]) -> tuple[Any, ...]:
    """The gradients of tokens, weight and bias, where wanted. Shapes: (T, E), (T, D), (E, D) → (T, D), (E, D), (E)."""
    # By itself: oneDNN takes longer to sum the bias's gradient beside that of the weight.
    for_bias = gradient.sum(0) if wanted[2] else None
    if tokens.dtype is not torch.float32 or is_batch(gradient):
        # oneDNN's own products, which are faster than its convolutions here; of batches torch knows no other.
        return gradient @ weight if wanted[0] else None, gradient.mT @ tokens if wanted[1] else None, for_bias
    gradient = gradient.contiguous()
    # Before the tokens' gradient, which is in the caches then for whoever wants it.
    for_weight = outer(gradient, tokens) if wanted[1] and is_faster_as_product(gradient, tokens) else None
    mask = [wanted[0], wanted[1] and for_weight is None, False]
    for_pixels, for_kernel, _ = torch.ops.aten.convolution_backward(
        as_pixels(gradient), as_pixels(tokens), as_kernel(weight), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask
    )
    if for_kernel is not None:
        for_weight = for_kernel.view(weight.shape)
    return None if for_pixels is None else as_tokens(for_pixels), for_weight, for_bias


def is_batch(gradient: Tensor) -> bool:
    """Whether torch computes many gradients at once (`is_grads_batched`): it has none of their numbers then."""
    return not torch._C._has_storage(gradient)


def is_faster_as_product(gradient: Tensor, tokens: Tensor) -> bool:
    """Whether a weight's gradient is: oneDNN's convolution takes up to twice as long for large ones of few tokens."""
    (count, inputs), outputs = tokens.shape, gradient.shape[1]
    return outputs < inputs and count <= 4 * inputs


def outer(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ·right, best where left is the narrower. Shapes: (T, E), (T, D) → (E, D)."""
    if not CAN_PACK or torch.is_grad_enabled():
        # What follows has no derivative of its own, and was not tried on other processors.
        return left.mT @ right
    # oneDNN takes the right one as it is and the left one transposed, which it copies twice as fast as torch.
    return product(left.to_mkldnn().transpose(0, 1).to_dense(), (right.mT, None))


def as_pixels(tokens: Tensor) -> Tensor:
    """A view of tokens as one image whose channels vary fastest. Shape: (T, D) → (1, D, 1, T)."""
    count, width = tokens.shape
    # In one call: after a large product none is in the caches, and each takes 25 µs.
    return tokens.as_strided((1, width, 1, count), (count * width, 1, count * width, width))


def as_kernel(weight: Tensor) -> Tensor:
    """Shape: (E, D) → (E, D, 1, 1)."""
    return weight.view(*weight.shape, 1, 1)


def as_tokens(pixels: Tensor) -> Tensor:
    """Shape: (1, D, 1, T) → (T, D)."""
    return pixels.permute(0, 2, 3, 1).flatten(0, 2)


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors as autocast gives them to a linear layer."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]
