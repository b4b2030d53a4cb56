"""Linear layers as 1×1 convolutions: the same function and gradients, and only where it is faster."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import assert_same_run, losses, run_tiny
from test_resume import SignalAt
from torch import Tensor, nn
from torch.profiler import profile

from scalelong.models import UViT
from scalelong.training import token_linear
from scalelong.training.token_linear import TokenLinear, take_tokens_as_pixels

LARGE = (4, 260, 256)

# Of less than 20,480 numbers in an image torch takes no 1×1 convolution to oneDNN.
WIDE = ("model.embed_dim=64", "training.batch_size=32")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """With one thread torch takes no 1×1 convolution to oneDNN."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def fast(layer: nn.Module) -> nn.Module:
    return take_tokens_as_pixels(copy.deepcopy(layer))


def goes_to_onednn(layer: nn.Module, x: Tensor) -> bool:
    with profile() as recorded:
        layer(x)
    return any(event.key == "aten::mkldnn_convolution" for event in recorded.key_averages())


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = layer(x)
    found = torch.autograd.grad(output, [x, *layer.parameters()], torch.cos(output.detach()))
    return [output.detach(), *found]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "x",
    [torch.randn(LARGE), torch.randn(1, 1040, 256), torch.randn(1040, 1, 256), torch.randn(1040, 1, 256).mT.mT],
)
def test_outputs_and_gradients_are_those_of_the_matrix_product(x: Tensor, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 300, bias=bias)
    ours = fast(plain)
    assert goes_to_onednn(ours, x) and not goes_to_onednn(plain, x)
    for found, expected in zip(gradients(ours, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.is_contiguous()


def test_the_strides_of_an_axis_of_one_do_not_matter() -> None:
    x = torch.randn(1040, 1, 256).transpose(0, 1)
    plain = nn.Linear(256, 300)
    output = fast(plain)(x)
    torch.testing.assert_close(output, plain(x), rtol=1e-4, atol=1e-4)
    assert output.stride() == plain(x).stride()


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
    ours = fast(plain)
    assert not goes_to_onednn(ours, x)
    assert torch.equal(ours(x), plain(x))


def test_half_precision_gets_the_matrix_product() -> None:
    plain, x = nn.Linear(256, 300), torch.randn(LARGE)
    ours = fast(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(x), plain(x))
        assert not goes_to_onednn(ours, x)
    assert torch.equal(ours.bfloat16()(x.bfloat16()), plain.bfloat16()(x.bfloat16()))


def test_one_thread_gets_the_matrix_product() -> None:
    plain, x = nn.Linear(256, 300), torch.randn(LARGE)
    torch.set_num_threads(1)
    assert torch.equal(fast(plain)(x), plain(x))


@torch.no_grad()
def test_without_gradients_it_is_the_matrix_product_with_any_number_of_threads() -> None:
    plain, x = nn.Linear(256, 300), torch.randn(LARGE)
    ours = fast(plain)
    assert not goes_to_onednn(ours, x)
    assert torch.equal(ours(x), plain(x))


def test_compiled_code_gets_the_matrix_product() -> None:
    ours, x = fast(nn.Linear(256, 300)), torch.randn(LARGE)
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
    assert take_tokens_as_pixels(network) is network
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

    found, expected = second(fast(plain)), second(plain)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# Runs


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions for the few tokens of small networks as well."""
    monkeypatch.setattr(token_linear, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(token_linear, "FEWEST_PRODUCTS", 1)


@pytest.mark.usefixtures("everywhere")
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    run_tiny(tmp_path / "whole", *WIDE)
    assert run_tiny(tmp_path / "stopped", *WIDE, display=SignalAt(4, signal.SIGTERM)).step == 4
    run_tiny(tmp_path / "stopped", *WIDE)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_losses_are_those_of_matrix_products(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_tiny(tmp_path / "products", *WIDE)
    request.getfixturevalue("everywhere")
    run_tiny(tmp_path / "convolutions", *WIDE)
    found, expected = losses(tmp_path / "convolutions"), losses(tmp_path / "products")
    assert found == pytest.approx(expected, rel=1e-5)
    assert found != expected
