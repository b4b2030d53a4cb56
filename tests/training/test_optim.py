"""Optimiser states come back to the bit from named tensors and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from scalelong.runs.checkpoint import CheckpointStore
from scalelong.training.state import (
    flatten_optimizer,
    parameter_names,
    restore_optimizer,
    unflatten_optimizer,
)


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


def through_a_checkpoint(tensors: dict[str, Tensor], state: dict[str, Any], folder: Path) -> Any:
    store = CheckpointStore(folder)
    store.save(1, {"optimizer": tensors}, {"optimizer": state})
    found = store.load(1)
    return found.tensors("optimizer"), found.state()["optimizer"]


def assert_same(found: Any, expected: Any) -> None:
    """Equal in type and value, tensors to the bit, all the way down."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        assert found == expected


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=1 / 3, betas=(0.99, 0.999), eps=1e-9),
    "fused": lambda model: AdamW(model.parameters(), fused=True),
    "amsgrad": lambda model: AdamW(model.parameters(), amsgrad=True),
    "tensor rate": lambda model: AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False),
    "named": lambda model: AdamW(model.named_parameters()),
    "groups": lambda model: AdamW(
        [
            {"params": list(model.parameters())[1::2], "weight_decay": 0.0, "lr": 1e-3},
            {"params": list(model.parameters())[0::2], "weight_decay": 0.03},
        ]
    ),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "no momentum": lambda model: SGD(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_optimisers_state_dict_comes_back_exactly(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer)
    names = parameter_names(model, optimizer)
    tensors, state = through_a_checkpoint(*flatten_optimizer(optimizer.state_dict(), names), tmp_path)
    assert_same(unflatten_optimizer(tensors, state, names), optimizer.state_dict())


def test_the_state_of_a_parameter_is_stored_under_its_name() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    tensors, state = flatten_optimizer(optimizer.state_dict(), parameter_names(model, optimizer))
    assert tensors["first.weight.exp_avg"] is optimizer.state[model["first"].weight]["exp_avg"]  # type: ignore[index]
    assert state["param_groups"][0]["params"] == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert json.loads(json.dumps(state)) == state


def test_an_optimiser_that_has_not_stepped_comes_back_empty(tmp_path: Path) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    names = parameter_names(model, optimizer)
    tensors, state = through_a_checkpoint(*flatten_optimizer(optimizer.state_dict(), names), tmp_path)
    assert tensors == {}
    assert_same(unflatten_optimizer(tensors, state, names), optimizer.state_dict())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_to_the_bit_after_a_restore(tmp_path: Path, kind: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer)
    flat = flatten_optimizer(optimizer.state_dict(), parameter_names(model, optimizer))
    tensors, state = through_a_checkpoint(*flat, tmp_path)
    again = make_model()
    again.load_state_dict(model.state_dict())
    resumed = OPTIMIZERS[kind](again)
    restore_optimizer(resumed, again, tensors, state)
    train(model, optimizer)
    train(again, resumed)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_parameters_are_matched_by_name_and_not_by_position(tmp_path: Path) -> None:
    model = make_model()
    optimizer = AdamW(model.named_parameters())
    train(model, optimizer)
    flat = flatten_optimizer(optimizer.state_dict(), parameter_names(model, optimizer))
    reversed_order = AdamW(list(model.named_parameters())[::-1])
    restore_optimizer(reversed_order, model, *flat)
    for parameter in model.parameters():
        assert_same(dict(reversed_order.state[parameter]), dict(optimizer.state[parameter]))
    assert reversed_order.state_dict()["param_groups"][0]["param_names"][0] == "last.bias"


def test_restored_averages_take_the_layout_of_their_weight() -> None:
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = AdamW(model.parameters())
    model(torch.randn(1, 4, 8, 8)).sum().backward()
    optimizer.step()
    tensors, state = flatten_optimizer(optimizer.state_dict(), parameter_names(model, optimizer))
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    resumed = AdamW(model.parameters())
    restore_optimizer(resumed, model, plain, state)
    for slot in ("exp_avg", "exp_avg_sq"):
        found = resumed.state[model.weight][slot]
        assert found.stride() == model.weight.stride() != plain[f"weight.{slot}"].stride()
        assert torch.equal(found, optimizer.state[model.weight][slot])


def test_a_state_of_other_parameters_is_refused_by_name() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    flat = flatten_optimizer(optimizer.state_dict(), parameter_names(model, optimizer))
    other = nn.ModuleDict({"first": nn.Linear(4, 8), "gate": nn.Linear(8, 2)})
    with pytest.raises(
        ValueError, match=r"without a saved state: gate\.bias, gate\.weight; saved but not here: last\."
    ):
        restore_optimizer(AdamW(other.parameters()), other, *flat)


def test_an_optimiser_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="4 parameters of the optimiser are not those of this ModuleDict"):
        parameter_names(make_model(), AdamW(make_model().parameters()))


def test_what_json_and_tensors_cannot_keep_is_refused_by_name() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    optimizer.param_groups[0]["callback"] = print
    with pytest.raises(ValueError, match="param_groups.0.callback of the optimiser is a builtin"):
        flatten_optimizer(optimizer.state_dict(), parameter_names(model, optimizer))
