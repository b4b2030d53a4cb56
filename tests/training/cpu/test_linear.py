"""Linear layers as 1×1 convolutions: the same function and gradients, and only where it is faster."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import SignalAt, assert_same_run, losses, run_tiny
from torch import Tensor, nn
from torch.profiler import profile

from scalelong.models.uvit import MLP
from scalelong.training.cpu import linear, take_cpu_layers

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
    return take_cpu_layers(copy.deepcopy(layer), torch.device("cpu"))


def goes_to_onednn(layer: nn.Module, x: Tensor) -> bool:
    with profile() as recorded:
        layer(x)
    return any(event.key == "aten::mkldnn_convolution" for event in recorded.key_averages())


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = layer(x)
    found = torch.autograd.grad(output, [x, *layer.parameters()], torch.cos(output.detach()))
    return [output.detach(), *found]


STRIDED = torch.randn(4, 256, 260).transpose(1, 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(LARGE),
        torch.randn(1, 1040, 256),
        torch.randn(1040, 1, 256),
        torch.randn(1040, 1, 256).mT.mT,
        torch.randn(1040, 256),
        torch.randn(2, 2, 260, 256),
        STRIDED,
    ],
)
def test_outputs_and_gradients_are_those_of_the_matrix_product(x: Tensor, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 300, bias=bias)
    ours = fast(plain)
    assert goes_to_onednn(ours, x) and not goes_to_onednn(plain, x)
    for found, expected in zip(gradients(ours, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.is_contiguous()


@pytest.mark.parametrize("can_pack", [True, False])
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_a_weight_with_fewer_outputs_gets_its_gradient_too(
    tokens: int, can_pack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(linear, "CAN_PACK", can_pack and linear.CAN_PACK)
    plain, x = nn.Linear(512, 200), torch.randn(tokens, 512)
    assert linear.is_faster_as_product(plain(x), x) is (tokens == 1024)
    for found, expected in zip(gradients(fast(plain), x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.is_contiguous()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("plain", [nn.Linear(512, 200), nn.Linear(200, 512), MLP(256, 300)])
def test_gradients_may_come_in_batches(plain: nn.Module) -> None:
    torch.manual_seed(0)
    ours = fast(plain)
    wanted = [torch.randn(1040, next(plain.parameters()).shape[1], requires_grad=True), *ours.parameters()]
    output = ours(wanted[0])
    upstream = torch.randn(2, *output.shape)
    found = torch.autograd.grad(output, wanted, upstream, is_grads_batched=True, retain_graph=True)
    for number, gradient in enumerate(upstream):
        expected = torch.autograd.grad(output, wanted, gradient, retain_graph=True)
        for batch, one in zip(found, expected, strict=True):
            torch.testing.assert_close(batch[number], one, rtol=1e-4, atol=1e-4)


def test_the_strides_of_an_axis_of_one_do_not_matter() -> None:
    x = torch.randn(1040, 1, 256).transpose(0, 1)
    plain = nn.Linear(256, 300)
    output = fast(plain)(x)
    torch.testing.assert_close(output, plain(x), rtol=1e-4, atol=1e-4)
    assert output.stride() == plain(x).stride()


def test_few_tokens_get_the_matrix_product_to_the_bit() -> None:
    plain, x = nn.Linear(256, 300), torch.randn(2, 100, 256)
    ours = fast(plain)
    assert not goes_to_onednn(ours, x)
    assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("bias", [True, False])
def test_under_autocast_outputs_and_gradients_are_those_of_a_linear_layer(bias: bool) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(256, 300, bias=bias), torch.randn(LARGE)
    ours = fast(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = gradients(ours, x), gradients(plain, x)
        assert goes_to_onednn(ours, x) and not goes_to_onednn(plain, x)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    assert found[0].dtype is torch.bfloat16
    for one, other in zip(found, expected, strict=True):
        # Sums in another order, rounded to 8 bits.
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7 * float(other.abs().max()))


def left_out(layer: nn.Module, frozen: str) -> list[str]:
    """What gets no gradient, if one of the parameters or the input wants none."""
    x = torch.randn(LARGE, requires_grad=frozen != "input")
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name != frozen)
    layer(x).sum().backward()
    found = {"input": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}
    return [name for name, gradient in found.items() if gradient is None]


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    assert left_out(fast(nn.Linear(256, 300)), frozen) == [frozen]


def test_weights_in_half_precision_get_the_matrix_product() -> None:
    plain, x = nn.Linear(256, 300).bfloat16(), torch.randn(LARGE).bfloat16()
    assert torch.equal(fast(plain)(x), plain(x))


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


def second_derivative(layer: nn.Module, x: Tensor) -> Tensor:
    """That of something, after the first of the parameters."""
    weight = next(layer.parameters())
    (first,) = torch.autograd.grad(layer(x).sin().sum(), weight, create_graph=True)
    return torch.autograd.grad(first.square().mean(), weight)[0]


@pytest.mark.parametrize(("inputs", "outputs"), [(256, 300), (300, 256)])
def test_second_derivatives_are_those_of_the_matrix_product(inputs: int, outputs: int) -> None:
    torch.manual_seed(1)
    plain, x = nn.Linear(inputs, outputs), torch.randn(4, 260, inputs)
    found, expected = second_derivative(fast(plain), x), second_derivative(plain, x)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# Two layers


def is_one_function(output: Tensor) -> bool:
    """Whether both layers and what is between them came about at once."""
    node: Any = output.grad_fn
    return "ConvolvedMLP" in node.next_functions[0][0].name()


def mlp(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    plain = MLP(256, 300)
    if not bias:
        plain.fc1, plain.fc2 = nn.Linear(256, 300, bias=False), nn.Linear(300, 256, bias=False)
    return plain


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("x", [torch.randn(LARGE), torch.randn(1040, 256), STRIDED])
def test_an_mlp_is_that_of_matrix_products(x: Tensor, bias: bool) -> None:
    plain = mlp(bias=bias)
    ours = fast(plain)
    assert is_one_function(ours(x))
    for found, expected in zip(gradients(ours, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_mlp_under_autocast_is_that_of_linear_layers() -> None:
    plain, x = mlp(), torch.randn(LARGE)
    ours = fast(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_one_function(ours(x))
        found, expected = gradients(ours, x), gradients(plain, x)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6 * float(other.abs().max()))


def test_the_gradient_that_an_mlp_is_given_stays_as_it_is() -> None:
    ours, x = fast(mlp()), torch.randn(LARGE, requires_grad=True)
    upstream = torch.randn(LARGE)
    before, output = upstream.clone(), ours(x)
    first = torch.autograd.grad(output, x, upstream, retain_graph=True)[0].clone()
    assert torch.equal(upstream, before)
    assert torch.equal(torch.autograd.grad(output, x, upstream)[0], first)


@pytest.mark.parametrize("name", ["fc1", "act", "fc2"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_an_mlp_with_a_hook_calls_its_modules(name: str, kind: str) -> None:
    ours, seen = fast(mlp()), []
    getattr(ours.get_submodule(name), kind)(lambda *_: seen.append(1))
    output = ours(torch.randn(LARGE, requires_grad=True))
    assert not is_one_function(output)
    output.sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("frozen", ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "input"])
def test_what_is_frozen_in_an_mlp_gets_no_gradient(frozen: str) -> None:
    assert left_out(fast(mlp()), frozen) == [frozen]


def test_second_derivatives_of_an_mlp_are_those_of_matrix_products() -> None:
    plain, x = mlp(), torch.randn(LARGE)
    found, expected = second_derivative(fast(plain), x), second_derivative(plain, x)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# Runs


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions for the few tokens of small networks as well."""
    monkeypatch.setattr(linear, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(linear, "FEWEST_PRODUCTS", 1)


@pytest.mark.usefixtures("everywhere")
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    run_tiny(tmp_path / "whole", *WIDE)
    assert run_tiny(tmp_path / "stopped", *WIDE, display=SignalAt(4, signal.SIGTERM)).step == 4
    run_tiny(tmp_path / "stopped", *WIDE)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_those_of_matrix_products(
    precision: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, convolve = (*WIDE, f"training.precision={precision}"), linear.ConvolvedTokens.apply
    called: list[torch.Size] = []

    def count(tokens: Tensor, *others: Any) -> Any:
        called.append(tokens.shape)
        return convolve(tokens, *others)

    monkeypatch.setattr(linear.ConvolvedTokens, "apply", count)
    run_tiny(tmp_path / "products", *settings)
    assert not called
    request.getfixturevalue("everywhere")
    run_tiny(tmp_path / "convolutions", *settings)
    assert called
    found, expected = losses(tmp_path / "convolutions"), losses(tmp_path / "products")
    assert found == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)
