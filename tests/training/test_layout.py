"""Linear layers as 1×1 convolutions: the same function and gradients, and only where it is faster."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_cases import tiny
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from scalelong.models import UViT
from scalelong.training.layout import TokenLinear, lay_out

LARGE = (4, 260, 256)


def laid_out(layer: nn.Module) -> nn.Module:
    return lay_out(copy.deepcopy(layer), tiny().training)


def convolutions(layer: nn.Module, x: Tensor) -> int:
    """How many matrix products of a forward pass go through a convolution."""
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return int(torch.ops.aten.convolution in counter.get_flop_counts()["Global"])


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    found = torch.autograd.grad(output, [x, *layer.parameters()], torch.cos(output.detach()))
    return [output.detach(), *found]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [LARGE, (1, 1040, 256), (1040, 1, 256)])
def test_outputs_and_gradients_are_those_of_the_matrix_product(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(256, 300, bias=bias), torch.randn(shape)
    ours = laid_out(plain)
    assert convolutions(ours, x) == 1 and convolutions(plain, x) == 0
    for found, expected in zip(gradients(ours, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.is_contiguous()


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 100, 256),
        torch.randn(1040, 256),
        torch.randn(4, 256, 260).transpose(1, 2),
        torch.randn(2, 2, 260, 256),
    ],
    ids=["few", "no tokens", "strided", "more axes"],
)
def test_other_inputs_get_the_matrix_product_to_the_bit(x: Tensor) -> None:
    plain = nn.Linear(256, 300)
    ours = laid_out(plain)
    assert convolutions(ours, x) == 0
    assert torch.equal(ours(x), plain(x))


def test_half_precision_gets_the_matrix_product() -> None:
    plain, x = nn.Linear(256, 300), torch.randn(LARGE)
    ours = laid_out(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert convolutions(ours, x) == 0
        assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.bfloat16()(x.bfloat16()), plain.bfloat16()(x.bfloat16()))


def test_compiled_code_gets_the_matrix_product() -> None:
    ours, x = laid_out(nn.Linear(256, 300)), torch.randn(LARGE)
    called: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    torch.compile(ours, backend=backend, fullgraph=True)(x)
    assert called == [torch.nn.functional.linear]


def test_a_network_keeps_its_names_and_values_and_layers_that_are_something_else() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    network = UViT(8, 2, embed_dim=16, depth=2, num_heads=2)
    network.extra = Doubled(4, 4)
    before = copy.deepcopy(network.state_dict())
    assert lay_out(network, tiny().training) is network
    assert network.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert type(network.extra) is Doubled
    assert type(network.decoder_pred) is TokenLinear


def test_second_derivatives_are_those_of_the_matrix_product() -> None:
    torch.manual_seed(1)
    plain, x = nn.Linear(256, 300), torch.randn(LARGE)

    def second(layer: nn.Module) -> Tensor:
        weight = next(layer.parameters())
        (first,) = torch.autograd.grad(layer(x).sin().sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().mean(), weight)[0]

    found, expected = second(laid_out(plain)), second(plain)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
