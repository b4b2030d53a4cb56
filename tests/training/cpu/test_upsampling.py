"""Images that are doubled and convolved: the same function and gradients through fewer products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

pytest.importorskip("diffusers")

from diffusers.models.upsampling import Upsample2D

from scalelong.training.cpu import take_cpu_layers
from scalelong.training.cpu.upsampling import QuickUpsample

IMAGES = (4, 16, 9, 11)


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


def test_under_autocast_they_are_too_and_the_kernels_are_added_up_before_they_are_rounded() -> None:
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


def test_few_pixels_or_no_gradients_give_the_same_bits() -> None:
    plain, few = layer(), torch.randn(3, 16, 9, 9)
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
