"""Clipping inside the fused optimiser: the step that torch takes after its own clipping."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from scalelong.recipes.config import OptimConfig
from scalelong.training.engine import build_optimizer, clip

CPU = torch.device("cpu")


def network(scale: float) -> nn.Module:
    """With gradients of about that size."""
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for parameter in found.parameters():
        parameter.grad = scale * torch.randn_like(parameter)
    return found


@pytest.mark.parametrize("limit", [0.5, 1e3, math.inf])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_a_step_is_that_of_torch_after_its_own_clipping(scale: float, limit: float) -> None:
    ours, plain = network(scale), network(scale)
    # A large ε, or the size of a gradient would not matter to Adam.
    optimizers = [build_optimizer(each, OptimConfig(lr=0.1), CPU) for each in (ours, plain)]
    for optimizer in optimizers:
        optimizer.param_groups[0]["eps"] = 1.0
    for _ in range(3):
        norm = clip(optimizers[0], list(ours.parameters()), limit)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), limit)
        torch.testing.assert_close(norm, expected)
        for optimizer in optimizers:
            optimizer.step()
        for found, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, other)
            found.grad, other.grad = (scale * torch.full_like(found, 0.1) for _ in range(2))


def test_gradients_that_are_small_enough_change_no_bit() -> None:
    ours = network(1e-3)
    plain = copy.deepcopy(ours)
    for source, copied in zip(ours.parameters(), plain.parameters(), strict=True):
        copied.grad = source.grad.clone() if source.grad is not None else None
    first, second = (build_optimizer(each, OptimConfig(lr=0.1), CPU) for each in (ours, plain))
    clip(first, list(ours.parameters()), 1.0)
    first.step()
    second.step()
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), plain.parameters(), strict=True))


def test_a_network_without_gradients_has_none_to_clip() -> None:
    frozen = nn.Linear(2, 2)
    assert clip(build_optimizer(frozen, OptimConfig(lr=0.1), CPU), list(frozen.parameters()), 1.0) == 0


def test_beside_a_scaler_gradients_are_brought_down_at_once() -> None:
    ours = network(1.0)
    optimizer = build_optimizer(ours, OptimConfig(lr=0.1), CPU)
    assert clip(optimizer, list(ours.parameters()), 0.5, scaled=True) > 0.5
    norms = [parameter.grad.norm() for parameter in ours.parameters() if parameter.grad is not None]
    assert torch.stack(norms).norm().item() == pytest.approx(0.5, rel=1e-4)
    assert not hasattr(optimizer, "grad_scale")
