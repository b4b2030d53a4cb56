"""What else reads the skips of a network reads those that it joins inline: the monitor, the advisor, the gain."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from families.crossing import PushedTwice
from families.unknown import InlineAdd
from scalelong import find_skips, scale_skips
from scalelong.diffusion import LinearSchedule
from scalelong.kappa import kappa_band, measure_gain, suggest_kappa
from scalelong.monitor import SkipMonitor


def picture() -> Tensor:
    return torch.randn(2, 3, 16, 16)


def train(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def test_the_monitor_reads_skips_at_their_inline_joins_and_changes_nothing() -> None:
    model, x = scale_skips(InlineAdd(), "uniform", value=0.5, example_inputs=picture()), picture()
    alone = copy.deepcopy(model)
    with torch.no_grad():
        outer, inner = model.outer(x), model.inner(torch.nn.functional.avg_pool2d(model.outer(x), 2))
    with SkipMonitor(model, every=1, probe_every=None) as monitor:
        train(model, x)
        monitor.step()
        numbers = monitor.latest
    train(alone, x)
    for index, skip in ((1, outer), (2, inner)):
        wanted = (0.5 * skip).flatten(1).norm(dim=1).square().mean().sqrt().item()
        assert numbers[f"skip{index}/feature"] == pytest.approx(wanted, rel=1e-4)
        assert numbers[f"skip{index}/gradient"] > 0 and numbers[f"skip{index}/coefficient"] == 0.5
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


def test_the_gain_of_a_path_through_an_inline_join_is_that_of_its_blocks() -> None:
    model, x = InlineAdd().eval(), picture()[:1]
    for block in (model.outer, model.inner, model.core, model.late, model.last):
        del block[1:]  # only the convolutions
    gains = measure_gain(model, model, x, find_skips(model, x), generator=torch.Generator().manual_seed(0)).path_gains
    path = torch.autograd.functional.jacobian(lambda x: model.head(model.last(model.outer(x))), x).flatten(0, 3)
    linear = path.flatten(1) if path.ndim > 2 else path
    assert gains[0] == pytest.approx(torch.linalg.matrix_norm(linear.double(), 2).item(), rel=0.05)


def test_what_a_network_scales_itself_counts_in_the_sum_of_squares() -> None:
    # With all skips halved, κ = 1 gives N/4, and the band is that of four times the targets.
    assert kappa_band(12, 0.5, 1.5, factors=[0.5] * 12).low == pytest.approx(kappa_band(12, 2, 6).low)
    model = PushedTwice(factor=2**-0.5)
    sites = find_skips(model, picture())
    images = torch.rand(20, 3, 16, 16) * 2 - 1
    advice = suggest_kappa(model, images, LinearSchedule(), predict=lambda x, t: model(x), sites=sites)
    assert advice.factors == (1.0, *[2**-0.5] * 4)
    assert any("multiplies 4 of its skips by a number itself" in reason for reason in advice.reasons)
