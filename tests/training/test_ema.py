"""The average of the weights: exact, in float32, and undone to the bit where it is only borrowed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from checkpoint_cases import assert_same
from torch import Tensor, nn

from scalelong import scale_skips
from scalelong.models import UViT
from scalelong.runs.checkpoint import CheckpointStore
from scalelong.training.state import EMA


def tiny(method: str = "ls") -> UViT:
    return scale_skips(UViT(8, embed_dim=16, depth=4, num_heads=2), method)


@torch.no_grad()
def drift(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_it_equals_the_loop_over_parameters_to_the_bit(dtype: torch.dtype, warmup: bool) -> None:
    model = tiny().to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = {name: parameter.detach().to(wide, copy=True) for name, parameter in model.named_parameters()}
    ema = EMA(model, decay=0.7, warmup=warmup)
    for step in range(40):
        drift(model)
        ema.update(model)
        decay = min(0.7, (1 + step) / (10 + step)) if warmup else 0.7
        for name, parameter in model.named_parameters():
            expected[name].lerp_(parameter.detach().to(wide), 1 - decay)
    found = ema.state_dict()
    assert_same({name: found[name] for name in expected}, expected)


def test_it_follows_the_definition_in_double_precision() -> None:
    model = nn.Linear(3, 3).double()
    expected = model.weight.detach().clone()
    ema = EMA(model, decay=0.9, warmup=False)
    for _ in range(20):
        drift(model)
        ema.update(model)
        expected = 0.9 * expected + 0.1 * model.weight.detach()
    # Another order of the same sum: a few units in the last place of numbers around 1.
    torch.testing.assert_close(ema.state_dict()["weight"], expected, rtol=0, atol=1e-15)


def test_the_warm_up_follows_its_formula() -> None:
    model = nn.Linear(1, 1)
    ema = EMA(model, decay=0.5)
    decays = []
    for _ in range(12):
        decays.append(ema.decay_now())
        ema.update(model)
    assert decays == [min(0.5, (1 + step) / (10 + step)) for step in range(12)]
    assert decays[0] == 0.1 and decays[-1] == 0.5
    assert EMA(model, warmup=False).decay_now() == 0.9999


def test_a_small_step_is_not_lost_in_half_precision() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    ema = EMA(model, decay=0.9999, warmup=False)
    nn.init.constant_(model.weight, 2.0)
    for _ in range(100):
        ema.update(model)
    assert ema.state_dict()["weight"].item() == pytest.approx(2 - 0.9999**100, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swapping_evaluates_with_the_average_and_gives_everything_back_to_the_bit(dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    ema = EMA(model, decay=0.5)
    drift(model)
    ema.update(model)
    own, average = snapshot(model), {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with ema.swap(model) as swapped:
        assert swapped is model
        assert_same(snapshot(model), {name: tensor.to(own[name].dtype) for name, tensor in average.items()})
    assert_same(snapshot(model), own)
    assert_same(ema.state_dict(), average)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_an_error_inside_a_swap_gives_the_weights_back_too() -> None:
    model = tiny()
    ema = EMA(model)
    drift(model)
    own = snapshot(model)
    with pytest.raises(KeyError, match="evaluation"), ema.swap(model):
        raise KeyError("evaluation")
    assert_same(snapshot(model), own)
    ema.update(model)


@pytest.mark.parametrize("use", [EMA.update, lambda ema, model: ema.state_dict()])
def test_the_average_cannot_be_used_while_it_is_swapped_in(use) -> None:
    model = tiny()
    ema = EMA(model)
    with ema.swap(model), pytest.raises(RuntimeError, match="leave the `with"):
        use(ema, model)
    with ema.swap(model), pytest.raises(RuntimeError, match="leave the `with"), ema.swap(model):
        pass


@pytest.mark.parametrize("method", ["none", "cs", "ls", "ls-individual", "learned-kappa", "norm"])
def test_the_average_loads_strictly_into_a_model_scaled_the_same(method: str) -> None:
    model = tiny(method)
    ema = EMA(model)
    drift(model)
    ema.update(model)
    other = tiny(method)
    other.load_state_dict(ema.state_dict())
    assert_same(snapshot(other), ema.state_dict())


def test_buffers_are_copied_and_not_averaged() -> None:
    model = nn.BatchNorm1d(3)
    ema = EMA(model, decay=0.9)
    model(torch.randn(8, 3))
    ema.update(model)
    found = ema.state_dict()
    for name, buffer in model.named_buffers():
        assert torch.equal(found[name], buffer) and found[name] is not buffer
    assert found["num_batches_tracked"].item() == 1


def test_buffers_that_are_not_saved_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.ones(3), persistent=False)
    ema = EMA(model)
    ema.update(model)
    assert ema.state_dict().keys() == model.state_dict().keys()


def test_tied_weights_have_one_shadow_under_both_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    ema = EMA(model, decay=0.5, warmup=False)
    before = snapshot(model)["embed.weight"]
    drift(model)
    ema.update(model)
    found = ema.state_dict()
    assert found["head.weight"] is found["embed.weight"]
    assert torch.equal(found["embed.weight"], before.lerp(model["embed"].weight.detach(), 0.5))
    model.load_state_dict(found)


def test_a_resumed_average_goes_on_to_the_bit(tmp_path: Path) -> None:
    model = tiny()
    ema = EMA(model)
    for _ in range(3):
        drift(model)
        ema.update(model)
    store = CheckpointStore(tmp_path)
    store.save(3, {"ema": ema.state_dict()}, {"ema_step": ema.step})
    resumed = EMA(copy.deepcopy(model))
    resumed.load_state_dict(store.load(3).tensors("ema"), step=store.load(3).state()["ema_step"])
    drift(model)
    for average in (ema, resumed):
        average.update(model)
    assert resumed.step == ema.step == 4
    assert_same(resumed.state_dict(), ema.state_dict())


def test_an_update_makes_no_tensor_of_a_parameters_size() -> None:
    model = nn.Linear(64, 64)
    ema = EMA(model)
    ema.update(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ema.update(model)
    assert max((event.self_cpu_memory_usage for event in profile.key_averages()), default=0) < model.weight.nbytes


def test_updating_leaves_gradients_and_the_model_alone() -> None:
    model = tiny()
    ema = EMA(model)
    before = snapshot(model)
    loss = model(torch.randn(1, 3, 8, 8), torch.zeros(1)).sum()
    ema.update(model)
    loss.backward()
    assert_same(snapshot(model), before)
    assert not any(tensor.requires_grad for tensor in ema.state_dict().values())


def test_a_model_of_other_parameters_is_refused_by_name() -> None:
    ema = EMA(UViT(8, embed_dim=16, depth=4, num_heads=2))
    with pytest.raises(ValueError, match=r"missing \['in_blocks.1.attn.proj.bias'"):
        ema.update(UViT(8, embed_dim=16, depth=2, num_heads=2))
    with pytest.raises(ValueError, match=r"this UViT does not fit the average: missing nothing, extra \['skip_scaling"):
        ema.update(tiny())
    with pytest.raises(ValueError, match="the saved average does not fit"):
        ema.load_state_dict({}, step=0)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay must be at least 0 and less than 1"):
        EMA(nn.Linear(1, 1), decay)
