"""The monitor says what state a run is in, and takes it back when it is over."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

from scalelong.models import UViT
from scalelong.monitor import SkipMonitor, Status, oscillation_index
from scalelong.monitor.states import LIMIT, StateWatch

BLOCKS = ("enc", "mid", "out")


def look(watch: StateWatch, step: int, **features: float) -> Status:
    numbers = {f"block/{name}/feature": features.get(name, 1.0) for name in BLOCKS} | {"block/mid/update": 0.04}
    watch.update(step, {name: value for name, value in numbers.items() if not math.isnan(value)}, BLOCKS)
    return watch.status


def tell(watch: StateWatch, *losses: float) -> None:
    """Each loss over a window of its own, with a little noise."""
    for loss in losses:
        for number in range(20):
            watch.add_loss(loss + 0.001 * (number % 2))


def test_a_block_that_has_grown_too_far_is_named_and_forgotten_once_it_is_small_again() -> None:
    watch = StateWatch()
    assert look(watch, 10) == Status("steady", 0, "enc")
    assert str(look(watch, 20, mid=30)).startswith(
        "steady since step 0, most of all in mid, whose features are × 30 of"
    )
    assert look(watch, 30, mid=LIMIT, out=9 * LIMIT) == Status("growing", 30, "mid", LIMIT, 0.04)
    assert look(watch, 40, mid=0.6 * LIMIT).state == "growing", "it has to fall to half"
    assert str(watch.status) == (
        "growing since step 30, first in mid, whose features are × 300 of the first ones, and whose weights move by "
        "4.00% a step"
    )
    assert look(watch, 50, mid=0.4 * LIMIT) == Status("steady", 50, "mid", 0.4 * LIMIT, 0.04)


def test_a_last_layer_that_begins_at_zero_may_grow_to_the_size_of_the_others() -> None:
    watch = StateWatch()
    look(watch, 1, out=0.0)
    assert look(watch, 2, out=3.0).state == "steady"


def test_a_loss_on_its_way_to_that_of_predicting_nothing_is_failing_until_it_comes_back() -> None:
    watch = StateWatch(nothing=1.0)
    tell(watch, 0.3, 0.2, 0.2)
    assert look(watch, 60).state == "steady"
    tell(watch, 0.8)
    status = look(watch, 80, out=2 * LIMIT)
    assert (status.state, status.since, status.block) == ("failing", 80, "out")
    assert str(status).startswith("failing since step 80: the loss is 0.8005, 74% of the way from its best, 0.2255, ")
    assert look(watch, 90).since == 80
    tell(watch, 0.2)
    assert (look(watch, 100).state, watch.status.since) == ("steady", 100)


def test_features_that_are_not_finite_are_failing_with_the_first_block_of_the_forward_pass() -> None:
    watch = StateWatch()
    look(watch, 10)
    assert str(look(watch, 20, mid=math.inf, out=math.nan)) == (
        "failing since step 20: the features of mid are not finite"
    )
    assert look(StateWatch(), 10, mid=math.nan).state == "failing", "also at the first reading"


def test_the_state_goes_through_json() -> None:
    watch = StateWatch(nothing=1.0)
    look(watch, 10)
    tell(watch, 0.3, 0.2)
    watch.add_loss(0.2)
    restored = StateWatch()
    restored.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    for one in (watch, restored):
        tell(one, 0.9)
        look(one, 60, mid=LIMIT)
    assert restored.status == watch.status and restored.state_dict() == watch.state_dict()


def noised(generator: torch.Generator, size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Stripes, noise and times, and the noise to predict."""
    phase, times = torch.rand(2, size, 1, 1, 1, generator=generator)
    images = torch.sin(6 * phase + torch.arange(8.0)).expand(size, 1, 8, 8)
    noise = torch.randn(size, 1, 8, 8, generator=generator)
    return images * torch.cos(1.57 * times) + noise * torch.sin(1.57 * times), 999 * times.flatten(), noise


def watched(model: nn.Module, lr: float, steps: int = 40) -> list[Status]:
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=lr), torch.Generator().manual_seed(0)
    found = []
    with SkipMonitor(model, every=4, probe_every=None, nothing=1.0) as monitor:
        for _ in range(steps):
            noisy, times, noise = noised(generator)
            optimizer.zero_grad()
            loss = (model(noisy, times) - noise).square().mean()
            loss.backward()
            optimizer.step()
            if monitor.step(loss=loss):
                found.append(monitor.status)
    return found


def deep_uvit() -> UViT:
    torch.manual_seed(0)
    return UViT(8, 4, in_chans=1, embed_dim=32, depth=12, num_heads=2)


def test_a_rate_that_works_is_steady_and_one_that_is_far_too_high_is_not() -> None:
    assert all(status.state == "steady" for status in watched(deep_uvit(), 1e-3))
    wild = watched(deep_uvit(), 0.3)
    assert wild[-1].state in ("growing", "failing")
    assert wild[-1].block in dict(deep_uvit().named_modules())


def test_losses_are_judged_in_the_order_of_the_readings_however_late_somebody_asks() -> None:
    torch.manual_seed(0)
    said = []
    for late in (False, True):
        model = UViT(8, 4, in_chans=1, embed_dim=16, depth=2, num_heads=2)
        with SkipMonitor(model, every=10, probe_every=None, nothing=1.0) as monitor:
            for number in range(60):
                noisy, times, _ = noised(torch.Generator().manual_seed(0), size=2)
                model(noisy, times).sum().backward()
                monitor.step(loss=torch.tensor(0.2 if number < 20 else 0.9 + 0.001 * (number % 2)))
                if not late:
                    assert monitor.status
        said.append(monitor.status)
    assert said[0].state == "failing" and said[0].since == said[1].since == 40


def test_the_index_is_the_relative_total_variation() -> None:
    noise = torch.rand(20, 5, dtype=torch.float64) + 1
    by_hand = (noise[1:] - noise[:-1]).abs().mean(dim=0) / noise.mean(dim=0)
    assert torch.allclose(oscillation_index(noise), by_hand)
    assert torch.allclose(oscillation_index(8 * noise), oscillation_index(noise))
    assert oscillation_index(torch.ones(9, 1)).item() == 0
    assert oscillation_index(torch.tensor([[1.0], [torch.inf]])).isnan().all()


@pytest.mark.parametrize("loss", ["0.3", torch.ones(2)])
def test_a_loss_that_is_no_number_is_an_error(loss: object) -> None:
    with SkipMonitor(deep_uvit()) as monitor, pytest.raises(TypeError, match="needs the loss of the step"):
        monitor.step(loss=loss)  # type: ignore[arg-type]
