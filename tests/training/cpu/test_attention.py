"""Attention over parts of the heads: the function of the plain one, and its gradients of the first and second order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scalelong.models.uvit import Attention, attend
from scalelong.training.cpu import attention, take_cpu_layers
from scalelong.training.cpu.attention import AttendInParts, parts


def fast(layer: Attention) -> Attention:
    return take_cpu_layers(layer, torch.device("cpu"))  # type: ignore[return-value]


def is_taken_apart(output: Tensor) -> bool:
    """Whether it came about by the function that works on parts."""
    nodes = [output.grad_fn]
    for node in nodes:
        nodes += [before for before, _ in node.next_functions if before is not None] if node is not None else []
    return any("AttendInParts" in node.name() for node in nodes if node is not None)


@pytest.mark.parametrize("cached", [1, 700, attention.CACHED_BYTES])
@pytest.mark.parametrize("tokens", [1, 9, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_those_of_double_precision_but_for_rounding(
    dtype: torch.dtype, tokens: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CACHED_BYTES", cached)
    exact = torch.randn(3, 2, 3, tokens, 8, dtype=torch.float64).to(dtype).double().requires_grad_()
    rounded = exact.detach().to(dtype).requires_grad_()
    upstream = torch.randn(2, 3, tokens, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*exact)
    with torch.autocast("cpu", enabled=dtype is torch.bfloat16):
        found = AttendInParts.apply(rounded)
    expected.backward(upstream)
    found.backward(upstream.to(dtype))
    assert found.dtype == dtype
    # A few roundings of numbers of size 1 to 4.
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    assert rounded.grad is not None
    torch.testing.assert_close(rounded.grad.double(), exact.grad, rtol=0, atol=tolerance)


def test_derivatives_of_both_orders_are_those_of_finite_differences() -> None:
    heads = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(AttendInParts.apply, (heads,))
    assert torch.autograd.gradgradcheck(AttendInParts.apply, (heads,))


@pytest.mark.parametrize(("cached", "sizes"), [(1, [1] * 5), (2 * 36, [2, 2, 1]), (10**9, [5])])
def test_parts_cover_every_head_once(cached: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CACHED_BYTES", cached)
    found = list(parts(torch.empty(5, 3, 3), torch.arange(5)))
    assert [len(room) for room, _ in found] == sizes
    assert torch.equal(torch.cat([numbers for _, numbers in found]), torch.arange(5))


def test_it_is_taken_for_training_alone_and_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_TOKENS", 9)
    layer, x = fast(Attention(16, 2)), torch.randn(2, 9, 16)
    assert is_taken_apart(layer(x))
    assert not is_taken_apart(layer(torch.randn(2, 10, 16)))
    with torch.no_grad():
        monkeypatch.setattr(attention.AttendInParts, "apply", None)
        heads = torch.randn(3, 2, 2, 9, 8, requires_grad=True)
        torch.testing.assert_close(layer.attend(heads), attend(heads))


def test_compiled_code_gets_the_plain_form() -> None:
    layer, x = fast(Attention(16, 2)), torch.randn(2, 9, 16)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert not is_taken_apart(compiled(x))
