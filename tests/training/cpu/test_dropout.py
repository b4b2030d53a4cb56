"""Dropout from 16 bits for each number: its share, its mean, its gradient, and its place among random numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from scalelong.training.cpu import take_cpu_layers
from scalelong.training.cpu.dropout import LEVELS, QuickDropout, factors


def quick(share: float, *, inplace: bool = False) -> nn.Module:
    layer = take_cpu_layers(nn.Dropout(share, inplace=inplace), torch.device("cpu"))
    assert type(layer) is QuickDropout
    return layer


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_the_share_is_dropped_and_the_rest_enlarged(share: float) -> None:
    torch.manual_seed(0)
    count = 1_000_003  # Not a multiple of four.
    dropped = quick(share)(torch.ones(count))
    kept = dropped[dropped != 0]
    # Five standard deviations of a share.
    assert abs(1 - len(kept) / count - share) < 5 * math.sqrt(share * (1 - share) / count)
    assert kept.unique().tolist() == [pytest.approx(LEVELS / round((1 - share) * LEVELS))]
    assert kept[0].item() == pytest.approx(1 / (1 - share), rel=1e-4)


@pytest.mark.parametrize("kept", [1, 7, 655, 32_768, 58_982, 65_535])
def test_every_level_is_kept_or_dropped_and_nothing_between(kept: int) -> None:
    levels, limit = torch.arange(-LEVELS // 2, LEVELS // 2).to(torch.int16), kept - LEVELS // 2
    expected = torch.where(levels < limit, LEVELS / kept, 0.0)
    assert torch.equal(factors(levels, limit, LEVELS / kept), expected)


def test_neighbours_are_dropped_independently() -> None:
    torch.manual_seed(0)
    zeros = (quick(0.5)(torch.ones(400_000)) == 0).view(-1, 4).float()
    correlation = torch.corrcoef(zeros.T) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(100_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_dropped_where_the_output_is(dtype: torch.dtype) -> None:
    x = torch.ones(3, 5, 7, dtype=dtype, requires_grad=True)
    output = quick(0.4)(x)
    output.sum().backward()
    assert x.grad is not None and output.dtype is dtype
    assert torch.equal(x.grad, output)


def test_the_same_seed_drops_the_same_numbers_and_another_does_not() -> None:
    layer, x = quick(0.5), torch.randn(1000)

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return layer(x)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("share", [0.0, 1.0, 1e-7])
def test_nothing_and_everything_are_left_to_torch(share: float) -> None:
    x = torch.randn(100)
    torch.manual_seed(0)
    found = quick(share)(x)
    torch.manual_seed(0)
    assert torch.equal(found, nn.Dropout(share)(x))


def test_eval_mode_is_the_identity() -> None:
    x = torch.randn(100)
    assert quick(0.5).eval()(x) is x


def test_in_place_stays_in_place() -> None:
    x = torch.ones(100)
    assert quick(0.5, inplace=True)(x).data_ptr() == x.data_ptr()
