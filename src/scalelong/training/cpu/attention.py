"""Attention over a few heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...models.uvit import attend
from ...recipes.steady import SteadyAttention

MOST_TOKENS = 512
"""Beyond it the probabilities, which are kept for the backward pass, take much memory in float32."""

CACHED_BYTES = 2**21
"""Scores to work on at a time, so that they stay in the processor's caches."""


class AttentionInParts(SteadyAttention):
    """Attention that trains through plain products over parts of the heads: torch's fused kernel is slow backwards."""

    def attend(self, heads: Tensor) -> Tensor:
        trains = heads.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not trains or heads.shape[-2] > MOST_TOKENS:
            return super().attend(heads)
        output: Any = AttendInParts.apply(heads.contiguous())
        return output


class AttendInParts(torch.autograd.Function):
    """softmax(q·kᵀ/√d)·v. Shape: (3, B, H, L, d), contiguous → (B, H, L, d)."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor) -> Tensor:
        query, key, value = heads.flatten(1, 2)
        scale = query.shape[-1] ** -0.5
        probabilities, output = query.new_empty(*query.shape[:2], query.shape[1]), torch.empty_like(query)
        with torch.autocast("cpu", enabled=False):
            for scores, q, k, v, chosen, found in parts(probabilities, query, key.mT, value, probabilities, output):
                torch.baddbmm(scores, q, k, beta=0, alpha=scale, out=scores)
                torch.softmax(scores, dim=-1, out=chosen)
                torch.bmm(chosen, v, out=found)
        ctx.save_for_backward(heads, probabilities)
        return output.view(heads.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (gradient,), (heads, probabilities) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():
            # The gradient's own derivative is wanted too, which torch knows of the plain form.
            return torch.autograd.grad(attend(heads), heads, gradient, create_graph=True)[0]
        query, key, value = packed = heads.flatten(1, 2)
        scale = query.shape[-1] ** -0.5
        upstream, found = gradient.flatten(0, 1).contiguous(), torch.empty_like(packed)
        given = (query, key, value.mT, upstream, probabilities)
        for scores, q, k, v, above, chosen, *own in parts(probabilities, *given, *found):
            torch.bmm(above, v, out=scores)
            # It reads the probabilities in order, which brings them into the caches for the product.
            inner = torch.ops.aten._softmax_backward_data(scores, chosen, -1, chosen.dtype)
            torch.bmm(chosen.mT, above, out=own[2])
            torch.baddbmm(q, inner, k, beta=0, alpha=scale, out=own[0])
            torch.baddbmm(k, inner.mT, q, beta=0, alpha=scale, out=own[1])
        return found.view(heads.shape)


def parts(probabilities: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """All tensors a few heads at a time, after room for the scores of these. Shapes: (N, L, L), and (N, …) each."""
    heads, tokens, _ = probabilities.shape
    most = max(1, CACHED_BYTES // (tokens**2 * probabilities.element_size()))
    size = even_share(heads, most, torch.get_num_threads())
    room = probabilities.new_empty(size, tokens, tokens)
    for part in zip(*(tensor.split(size) for tensor in tensors), strict=True):
        yield room[: len(part[0])], *part


def even_share(count: int, most: int, threads: int) -> int:
    """How many to take at a time, about `most`, so that no thread waits: a multiple of them, and no small rest.

    >>> even_share(64, 7, 2), even_share(256, 124, 2), even_share(3, 7, 2)
    (8, 86, 3)
    """
    turns = max(1, -(-count // (most + threads - 1)))
    share = -(-count // turns)
    return max(1, min(count, -(-share // threads) * threads))
