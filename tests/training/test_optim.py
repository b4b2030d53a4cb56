"""What an optimiser keeps comes back to the bit from tensors named after its parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from scalelong.config.sections import OptimConfig
from scalelong.runs.checkpoint import CheckpointStore
from scalelong.training.parallel import build_optimizer
from scalelong.training.state import moments_of, restore_moments


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"first": nn.Linear(4, 8), "last": nn.Linear(8, 2)}).to(dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        loss = model["last"](model["first"](inputs).relu()).float().square().mean()  # type: ignore[index]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def through_a_checkpoint(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    store = CheckpointStore(folder)
    store.save(1, {"optimizer": tensors}, {})
    return store.load(1).tensors("optimizer")


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=1 / 3, betas=(0.99, 0.999), eps=1e-9),
    "fused": lambda model: AdamW(model.parameters(), fused=True),
    "amsgrad": lambda model: AdamW(model.parameters(), amsgrad=True),
    "groups": lambda model: AdamW(
        [
            {"params": list(model.parameters())[1::2], "weight_decay": 0.0, "lr": 1e-3},
            {"params": list(model.parameters())[0::2], "weight_decay": 0.03},
        ]
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_goes_on_to_the_bit_after_a_restore(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer)
    tensors = through_a_checkpoint(moments_of(optimizer, model), tmp_path)
    again = make_model(dtype)
    again.load_state_dict(model.state_dict())
    resumed = OPTIMIZERS[kind](again)
    restore_moments(resumed, again, tensors)
    for name, kept in moments_of(resumed, again).items():
        expected = moments_of(optimizer, model)[name]
        assert kept.dtype == expected.dtype and torch.equal(kept, expected), name
    train(model, optimizer)
    train(again, resumed)
    for name, weights in again.state_dict().items():
        assert torch.equal(weights, model.state_dict()[name]), name


def test_moments_are_stored_under_the_name_of_their_parameter() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    assert moments_of(optimizer, model) == {}
    train(model, optimizer)
    tensors = moments_of(optimizer, model)
    assert tensors["first.weight.exp_avg"] is optimizer.state[model["first"].weight]["exp_avg"]  # type: ignore[index]
    names = ("first.weight", "first.bias", "last.weight", "last.bias")
    assert set(tensors) == {f"{name}.{slot}" for name in names for slot in ("step", "exp_avg", "exp_avg_sq")}


def test_an_optimiser_that_has_not_stepped_comes_back_empty(tmp_path: Path) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    restore_moments(optimizer, model, through_a_checkpoint(moments_of(optimizer, model), tmp_path))
    assert optimizer.state_dict()["state"] == {}


def test_parameters_are_matched_by_name_and_not_by_position() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    reversed_order = AdamW(list(model.parameters())[::-1])
    restore_moments(reversed_order, model, moments_of(optimizer, model))
    for parameter in model.parameters():
        found, expected = reversed_order.state[parameter], optimizer.state[parameter]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[slot], expected[slot]) for slot in expected)


def test_restored_averages_take_the_layout_of_their_weight() -> None:
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = AdamW(model.parameters())
    model(torch.randn(1, 4, 8, 8)).sum().backward()
    optimizer.step()
    plain = {name: tensor.contiguous() for name, tensor in moments_of(optimizer, model).items()}
    resumed = AdamW(model.parameters())
    restore_moments(resumed, model, plain)
    for slot in ("exp_avg", "exp_avg_sq"):
        found = resumed.state[model.weight][slot]
        assert found.stride() == model.weight.stride() != plain[f"weight.{slot}"].stride()
        assert torch.equal(found, optimizer.state[model.weight][slot])


def test_a_state_of_other_parameters_is_refused_by_name() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    other = nn.ModuleDict({"first": nn.Linear(4, 8), "gate": nn.Linear(8, 2)})
    with pytest.raises(ValueError, match=r"gate\.bias, gate\.weight, last\.bias is only in one of them"):
        restore_moments(AdamW(other.parameters()), other, moments_of(optimizer, model))


def test_the_recipe_says_what_adamw_adds_to_the_root() -> None:
    model, device = nn.Linear(2, 2), torch.device("cpu")
    assert build_optimizer(model, OptimConfig(lr=1e-3), device).param_groups[0]["eps"] == 1e-8
    assert build_optimizer(model, OptimConfig(lr=1e-3, eps=1e-6), device).param_groups[0]["eps"] == 1e-6
