"""How networks lie in memory, and that a convolution keeps to it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from scalelong.recipes.config import TrainingConfig
from scalelong.recipes.layout import for_drawing, has_channels_last, lay_out
from scalelong.recipes.steady.layers import SteadyConv2d


def config(channels_last: bool | str = "auto") -> TrainingConfig:
    return TrainingConfig.model_validate({"steps": 1, "batch_size": 1, "channels_last": channels_last})


def with_channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def copied_shapes(layer: nn.Module, x: Tensor) -> list[list[int]]:
    with profile(record_shapes=True) as recorded:
        layer(x).square().sum().backward()
    return [event.input_shapes[0] for event in recorded.events() if event.name == "aten::copy_"]


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [("auto", "cpu", False), ("auto", "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_channels_are_last_on_gpus_unless_the_recipe_says_otherwise(
    setting: bool | str, device: str, expected: bool
) -> None:
    assert has_channels_last(config(setting), torch.device(device)) is expected


@pytest.mark.parametrize("channels_last", [True, False])
def test_kernels_have_the_layout_of_the_recipe(channels_last: bool) -> None:
    network = lay_out(nn.Sequential(nn.Conv2d(4, 8, 3)), config(channels_last))
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last) is channels_last


def test_a_weight_is_not_copied_for_an_input_with_its_channels_last() -> None:
    plain, x = nn.Conv2d(32, 48, 3), with_channels_last(torch.randn(2, 32, 8, 8))
    kept = lay_out(copy.deepcopy(plain), config())
    assert [48, 32, 3, 3] in copied_shapes(plain, x)
    assert [48, 32, 3, 3] not in copied_shapes(kept, x)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("side", [1, 3])
def test_outputs_and_gradients_are_those_of_the_plain_convolution(side: int, channels_last: bool) -> None:
    plain = nn.Conv2d(16, 24, side)
    kept = lay_out(copy.deepcopy(plain), config(channels_last))
    assert type(kept) is SteadyConv2d
    images = torch.randn(2, 16, 8, 8)
    for x in (images, with_channels_last(images)):
        found, expected = (
            torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters())) for layer in (kept, plain)
        )
        torch.testing.assert_close(kept(x), plain(x))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_layers_that_are_something_else_stay_so() -> None:
    class Doubled(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    assert type(lay_out(Doubled(1, 1, 1), config())) is Doubled


@pytest.mark.parametrize("channels_last", [True, False])
def test_kernels_have_their_channels_last_while_images_are_drawn_and_are_as_before_then(channels_last: bool) -> None:
    network = lay_out(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1), nn.Linear(3, 3)), config(channels_last))
    before = [(weight, weight.stride(), weight.detach().clone()) for weight in network.parameters()]
    with pytest.raises(KeyboardInterrupt), for_drawing(network):
        assert network[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert network[2].draws
        raise KeyboardInterrupt
    for weight, (same, stride, values) in zip(network.parameters(), before, strict=True):
        assert weight is same and weight.stride() == stride and torch.equal(weight, values)
    assert not network[2].draws
