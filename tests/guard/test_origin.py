"""A non-finite number is traced to the place where it first appeared."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalelong import scale_skips
from scalelong.guard.nonfinite import Origin, all_finite, find_first_nonfinite
from scalelong.models import UViT
from scalelong.models.uvit import attend


def make_model(**options: Any) -> UViT:
    return scale_skips(UViT(8, embed_dim=16, depth=4, num_heads=2, **options), "ls")


def step_of(model: nn.Module) -> Callable[[], Tensor]:
    """The forward pass of a training step on a fixed batch: it returns the loss."""
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([1.0, 500.0])
    return lambda: model(x, t).square().mean()


def spoil(value: float) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        spoilt = output.clone()
        spoilt.view(-1)[-1] = value
        return spoilt

    return hook


MODULES = [
    *("patch_embed.proj", "in_blocks.0.norm1", "in_blocks.1.attn.qkv", "mid_block.mlp.act", "out_blocks.0.skip_linear"),
    *("out_blocks.1.mlp.fc2", "out_blocks.1", "norm", "final_layer"),
]


@pytest.mark.parametrize("path", MODULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("use_checkpoint", [False, True], ids=["plain", "checkpointed"])
def test_the_module_whose_output_was_first_non_finite_is_named(path: str, value: float, use_checkpoint: bool) -> None:
    model = make_model(use_checkpoint=use_checkpoint)
    model.get_submodule(path).register_forward_hook(spoil(value))
    assert find_first_nonfinite(model, step_of(model)) == Origin("output", path)


def test_of_two_the_first_to_run_is_named() -> None:
    model = make_model()
    for path in ("out_blocks.0.attn", "in_blocks.1.mlp"):
        model.get_submodule(path).register_forward_hook(spoil(float("nan")))
    assert find_first_nonfinite(model, step_of(model)) == Origin("output", "in_blocks.1.mlp")


def test_a_number_made_between_modules_is_laid_on_the_module_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    calls = []

    def overflow(heads: Tensor) -> Tensor:
        calls.append(None)
        return attend(heads) * (float("inf") if len(calls) == 2 else 1)

    monkeypatch.setattr("scalelong.models.uvit.attend", overflow)
    assert find_first_nonfinite(model, step_of(model)) == Origin("output", "in_blocks.1.attn")


def test_a_number_made_by_the_model_itself_is_laid_on_it() -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x / 0)

    model = Divides()
    assert find_first_nonfinite(model, lambda: model(torch.ones(1, 2)).sum()) == Origin("output", "Divides")


def test_an_input_that_was_already_non_finite_is_told_apart() -> None:
    model = make_model()
    x = torch.randn(1, 3, 8, 8)
    x[0, 0, 0, 0] = float("nan")
    origin = find_first_nonfinite(model, lambda: model(x, timesteps=torch.zeros(1)).mean())
    assert origin == Origin("input", "UViT")
    assert str(origin) == "the input of UViT was already non-finite"
    bad_time = torch.full((1,), float("inf"))
    assert find_first_nonfinite(model, lambda: model(torch.zeros(1, 3, 8, 8), timesteps=bad_time)) == origin


def test_a_parameter_that_was_already_non_finite_is_told_apart_without_a_forward() -> None:
    model = make_model()
    with torch.no_grad():
        model.mid_block.attn.proj.bias[3] = float("inf")

    def run() -> None:
        raise AssertionError("there is no need to run the model")

    origin = find_first_nonfinite(model, run)
    assert origin == Origin("parameter", "mid_block.attn.proj.bias")
    assert str(origin) == "the parameter mid_block.attn.proj.bias was already non-finite"


def test_a_buffer_that_was_already_non_finite_is_told_apart() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    model[1].running_mean[0] = float("nan")
    origin = find_first_nonfinite(model, lambda: model(torch.ones(3, 2)).sum())
    assert origin == Origin("buffer", "1.running_mean")


def test_a_loss_that_overflows_by_itself_is_told_apart() -> None:
    model = make_model()
    run = step_of(model)
    assert find_first_nonfinite(model, lambda: run() * float("inf")) == Origin("loss", "loss")


class BadGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * float("nan")


def apply_bad_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return BadGradient.apply(output)  # type: ignore[return-value]


# The gradient is bad from the spoilt output backwards, so the module itself has the first bad parameter.
@pytest.mark.parametrize("path", ["in_blocks.0.attn.proj", "mid_block.mlp.fc1", "out_blocks.1.norm2", "final_layer"])
def test_a_finite_forward_with_a_bad_gradient_names_the_parameter_nearest_to_the_loss(path: str) -> None:
    model = make_model()
    model.get_submodule(path).register_forward_hook(apply_bad_gradient)
    origin = find_first_nonfinite(model, step_of(model))
    assert origin == Origin("gradient", f"{path}.weight")
    assert str(origin).startswith("the forward pass was finite")


def test_clipping_by_a_bad_norm_does_not_hide_where_it_came_from() -> None:
    model = make_model()
    model.get_submodule("mid_block.mlp.fc1").register_forward_hook(apply_bad_gradient)
    run = step_of(model)
    run().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not model.final_layer.weight.grad.isfinite().any(), "clipping spoils every gradient"  # type: ignore
    assert find_first_nonfinite(model, run) == Origin("gradient", "mid_block.mlp.fc1.weight")


@pytest.mark.parametrize("returns_loss", [True, False], ids=["loss", "no loss"])
def test_gradients_at_hand_are_looked_at_when_new_ones_do_not_tell(returns_loss: bool) -> None:
    model = make_model()
    run = step_of(model)
    run().backward()
    model.norm.bias.grad[0] = float("nan")  # type: ignore[index]
    forward = run if returns_loss else lambda: run().detach()
    assert find_first_nonfinite(model, forward) == Origin("gradient", "norm.bias")


def test_a_bad_part_is_found_after_finite_ones_and_before_clipped_gradients_are_blamed() -> None:
    model = make_model()
    run = step_of(model)
    run().backward()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    origin = find_first_nonfinite(model, run, lambda: run() * float("inf"), run)
    assert origin == Origin("loss", "loss")


def test_the_parts_of_a_batch_are_looked_at_one_after_the_other() -> None:
    model, held = make_model(), []

    def forward() -> Tensor:
        assert not any(reference() is not None for reference in held), "the graph of an earlier part is still held"
        loss = step_of(model)()
        held.append(weakref.ref(loss))
        return loss

    assert find_first_nonfinite(model, forward, forward, forward) is None
    assert len(held) == 3


def test_nothing_is_found_where_all_is_finite_and_nothing_is_left_behind() -> None:
    model = make_model().train()
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert find_first_nonfinite(model, step_of(model)) is None
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_that_raises_leaves_no_hooks_behind() -> None:
    model = make_model()
    before = sum(len(m._forward_hooks) for m in model.modules())
    with pytest.raises(ValueError, match="x must have shape"):
        find_first_nonfinite(model, lambda: model(torch.zeros(1, 2, 8, 8), torch.zeros(1)))
    assert sum(len(m._forward_hooks) for m in model.modules()) == before


def test_looking_draws_no_random_numbers_from_training() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    state = torch.get_rng_state()
    find_first_nonfinite(model, lambda: model(torch.ones(2, 4)).sum())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_compiled_model_is_looked_into_as_well() -> None:
    model = make_model()
    model.get_submodule("mid_block.mlp").register_forward_hook(spoil(float("nan")))
    model.compile(backend="eager")
    run = step_of(model)
    assert run().isnan()
    assert find_first_nonfinite(model, run) == Origin("output", "mid_block.mlp")


def test_nested_outputs_are_looked_into() -> None:
    bad = torch.tensor([1.0, float("nan")])
    assert not all_finite({"a": [torch.zeros(1), (bad,)]})
    assert all_finite({"a": [torch.zeros(1), (torch.ones(2, dtype=torch.int64), None, "text")]})
