"""Images that are doubled and convolved: the same function and gradients through fewer products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

pytest.importorskip("diffusers")

from diffusers.models.upsampling import Upsample2D

from scalelong.recipes.steady import make_steady
from scalelong.training.cpu import take_cpu_layers
from scalelong.training.cpu.upsampling import QuickUpsample, doubled

IMAGES = (12, 16, 9, 11)


def layer(**settings: Any) -> Upsample2D:
    torch.manual_seed(0)
    return Upsample2D(16, **{"use_conv": True, "out_channels": 24, **settings})


def fast(plain: nn.Module) -> nn.Module:
    ours = take_cpu_layers(copy.deepcopy(plain), torch.device("cpu"))
    assert type(ours) is QuickUpsample
    return ours


def is_quick(ours: nn.Module, *inputs: Any) -> bool:
    """Whether it went without enlarging the images first."""
    with profile() as recorded:
        ours(*inputs)
    return not any("upsample" in event.key for event in recorded.key_averages())


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = module(x)
    return [output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], torch.cos(output.detach()))]


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Sums in another order, of numbers that are as large as the largest of the sums."""
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
def test_outputs_and_gradients_are_those_of_enlarged_images(
    bias: bool, layout: Any, weights: Any, dtype: torch.dtype, tolerance: float
) -> None:
    plain = layer(bias=bias).to(dtype=dtype, memory_format=weights)
    ours, x = fast(plain), torch.randn(IMAGES, dtype=dtype).contiguous(memory_format=layout)
    assert is_quick(ours, x) and not is_quick(plain, x)
    for found, expected in zip(gradients(ours, x), gradients(plain, x), strict=True):
        assert_close(found, expected, tolerance)


def test_the_convolution_of_a_network_that_draws_is_known_and_keeps_to_the_layout_of_its_weight() -> None:
    plain, x = layer(), torch.randn(IMAGES).contiguous(memory_format=torch.channels_last)
    ours = fast(make_steady(copy.deepcopy(plain)))
    assert type(ours.conv) is not nn.Conv2d and is_quick(ours, x)
    assert ours(x).is_contiguous()
    assert_close(ours(x), plain(x), 1e-5)


def test_kernels_are_added_up_before_they_are_rounded() -> None:
    kernel = torch.randn(5, 3, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = doubled(kernel)
    assert found.dtype is torch.float32 and torch.equal(found, doubled(kernel))


def test_the_first_call_may_be_inside_another_mode() -> None:
    plain, x = layer(), torch.randn(IMAGES)
    ours = fast(plain)
    with torch.inference_mode(), torch.enable_grad():
        ours(x)
    with torch.device("meta"):
        assert_close(ours(x), plain(x), 1e-5)
    assert_close(ours(x), plain(x), 1e-5)
    ours(x).sum().backward()


def test_under_autocast_outputs_and_gradients_are_those_of_enlarged_images() -> None:
    plain, x = layer(), torch.randn(IMAGES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = gradients(fast(plain), x), gradients(plain, x)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    assert found[0].dtype is torch.bfloat16
    exact = gradients(plain, x)
    for one, other, right in zip(found, expected, exact, strict=True):
        assert_close(one.float(), right, 2**-6)
        assert (one - right).abs().mean() <= 1.5 * (other - right).abs().mean()


def test_second_derivatives_are_those_of_enlarged_images() -> None:
    def second(module: nn.Module) -> Tensor:
        weight = next(module.parameters())
        (first,) = torch.autograd.grad(module(x).sin().sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().mean(), weight)[0]

    plain, x = layer(), torch.randn(IMAGES)
    assert is_quick(fast(plain), x)
    found, expected = second(fast(plain)), second(plain)
    assert expected.abs().max() > 0.1
    assert_close(found, expected, 1e-4)


def test_sizes_may_be_given_if_they_are_the_double() -> None:
    plain, x = layer(), torch.randn(IMAGES)
    ours = fast(plain)
    assert is_quick(ours, x, (18, 22)) and not is_quick(ours, x, (17, 22))
    for size in ((18, 22), torch.Size((18, 22)), (17, 22)):
        assert_close(ours(x, size), plain(x, size), 1e-5)


OTHERS = {
    "without a convolution": {"use_conv": False, "out_channels": None},
    "transposed": {"use_conv": False, "use_conv_transpose": True},
    "of another size": {"kernel_size": 5, "padding": 2},
    "of one pixel": {"kernel_size": 1, "padding": 0},
    "normed": {"norm_type": "ln_norm", "eps": 1e-6, "elementwise_affine": True},
    "not enlarged": {"interpolate": False},
    "under another name": {"name": "other"},
}


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_another_layer_is_what_it_was_to_the_bit(settings: dict[str, Any]) -> None:
    plain, x = layer(**settings), torch.randn(IMAGES)
    assert torch.equal(fast(plain)(x), plain(x))


@pytest.mark.parametrize("setting", ["groups", "padding_mode", "dilation", "stride"])
def test_another_convolution_in_it_is_what_it_was_to_the_bit(setting: str) -> None:
    plain, x = layer(out_channels=16), torch.randn(IMAGES)
    values = {"groups": 4, "padding_mode": "reflect", "dilation": 2, "stride": 2}
    plain.conv = nn.Conv2d(16, 16, 3, padding=1, **{setting: values[setting]})
    assert torch.equal(fast(plain)(x), plain(x))


class Halved(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def test_a_convolution_that_does_something_else_is_called() -> None:
    plain, x = layer(), torch.randn(IMAGES)
    plain.conv = Halved(16, 24, 3, padding=1)
    assert torch.equal(fast(plain)(x), plain(x))
    ours = fast(layer())
    ours.conv.forward = torch.zeros_like
    assert torch.equal(ours(x), torch.zeros(12, 16, 18, 22))


def test_code_is_compiled_as_often_as_that_of_diffusers_and_the_same() -> None:
    def compiled(module: nn.Module) -> list[list[object]]:
        graphs: list[list[object]] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        torch.compiler.reset()
        code = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
        for count in (2, 12, 24, 3):
            code(torch.randn(count, *IMAGES[1:]))
        return graphs

    expected = compiled(layer())
    assert torch.nn.functional.interpolate in expected[0]
    assert compiled(fast(layer())) == expected


def test_few_pixels_or_no_gradients_give_the_same_bits() -> None:
    plain, few = layer(), torch.randn(10, 16, 9, 11)
    ours = fast(plain)
    assert torch.equal(ours(few), plain(few))
    with torch.no_grad():
        assert torch.equal(ours(torch.ones(IMAGES)), plain(torch.ones(IMAGES)))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_hook_of_the_convolution_is_called(kind: str) -> None:
    ours, seen = fast(layer()), []
    getattr(ours.conv, kind)(lambda *_: seen.append(1))
    ours(torch.randn(IMAGES, requires_grad=True)).sum().backward()
    assert len(seen) == 1
