"""Skips that a module's own forward joins, with no module in between: scaled at the join, and nowhere else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint

from families.joining import InlineActivation, SharedBlock, TwoReaders
from families.oracle import Join, run_scaled
from families.unknown import InlineAdd, double, halve
from scalelong import Inline, SkipSite, find_skips, fuse_skips, scale_skips, unscale_skips


def picture() -> Tensor:
    return torch.randn(2, 3, 16, 16)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert _get_current_function_mode() is None


class InPlace(InlineAdd):
    """Adds to the trunk in place."""

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer(x)
        inner = self.inner(halve(outer))
        x = double(self.core(halve(inner)))
        x += inner
        return self.head(self.last(torch.add(double(self.late(x)), other=outer)))


CASES: list[tuple[type[nn.Module], Join, int]] = [
    (TwoReaders, Join(""), 1),
    (InlineActivation, Join(""), 2),
    (SharedBlock, Join(""), 2),
    (InlineAdd, Join("", op="add"), 2),
]


def run(model: nn.Module, x: Any) -> Tensor:
    return model(x)


@pytest.mark.parametrize("kind, join, count", CASES)
def test_a_skip_that_is_joined_inline_is_multiplied_at_its_join_and_nowhere_else(
    kind: type[nn.Module], join: Join, count: int
) -> None:
    model, x = kind().eval(), picture()
    with torch.no_grad():
        before, wanted = model(x), run_scaled(model, x, run, join, [0.6**i for i in range(count)])
        scaled = scale_skips(model, "cs", kappa=0.6, example_inputs=x)(x)
        assert torch.equal(scaled, wanted) or count == 1
        assert torch.equal(unscale_skips(model)(x), before)


def test_addition_in_place_and_by_keyword_is_scaled_like_any_other() -> None:
    model, x = InPlace().eval(), picture()
    plain = InlineAdd().eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))
    for each in (model, plain):
        scale_skips(each, "uniform", value=0.5, example_inputs=x)
    assert torch.equal(model(x), plain(x))


def scaled_model(method: str = "ls") -> tuple[nn.Module, Tensor]:
    x = picture()
    return scale_skips(InlineAdd(), method, example_inputs=x), x


def gradients(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    call(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_network_gives_the_same_gradients(reentrant: bool) -> None:
    model, x = scaled_model()
    plain = gradients(model, model, x)
    again = gradients(model, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=reentrant), x)
    assert len(plain) == len(again) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


class CheckpointedJoin(InlineAdd):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer(x)
        inner = self.inner(halve(outer))
        low = double(self.core(halve(inner)))
        x = checkpoint(lambda low, inner: self.late(low + inner), low, inner, use_reentrant=self.reentrant)
        return self.head(self.last(double(x) + outer))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_join_in_a_checkpointed_function_is_refused_in_training(reentrant: bool) -> None:
    model, x = CheckpointedJoin(), picture()
    model.reentrant = reentrant
    scale_skips(model, "cs", example_inputs=x)
    with pytest.raises(ValueError, match="joins a scaled skip .* in a function given to torch.utils.checkpoint"):
        model(x)


def test_a_join_in_a_checkpointed_function_is_scaled_without_gradients() -> None:
    model, x = CheckpointedJoin(), picture()
    plain = InlineAdd()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(*(scale_skips(each, "cs", example_inputs=x)(x) for each in (model, plain)))


def test_copies_averages_and_files_of_the_network_scale_by_themselves() -> None:
    model, x = scaled_model("uniform")
    expected = model(x)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    average.update_parameters(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), average):
        assert torch.equal(other(x), expected)
        unscale_skips(other)
        assert not torch.equal(other(x), expected)
        assert torch.equal(model(x), expected)


def test_a_network_whose_forward_fails_leaves_nothing_behind() -> None:
    model, x = scaled_model()
    expected = model(x)
    with pytest.raises(RuntimeError):
        model(x[:, :2])
    for error in (KeyboardInterrupt, ValueError):
        hook = model.core.register_forward_pre_hook(lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(error):
            model(x)
        hook.remove()
        assert torch.equal(model(x), expected)


class Sometimes(InlineAdd):
    def forward(self, x: Tensor, hint: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x if hint is None else x + hint)


def test_a_call_that_makes_another_number_of_joins_is_an_error() -> None:
    model, x = Sometimes(), picture()
    scale_skips(model, "cs", example_inputs=x)
    with pytest.raises(ValueError, match=r"Sometimes made 3 joins .* \(part 1 of sum . of 2\)"):
        model(x, x)


def test_the_modules_that_a_forward_calls_may_join_as_they_like() -> None:
    class Doubling(nn.Module):
        times = 1

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = x + x
            return x

    model, x = InlineAdd().eval(), picture()
    model.core.append(Doubling())
    plain = copy.deepcopy(model)
    scale_skips(model, "cs", kappa=1.0, example_inputs=x)
    model.core[-1].times = plain.core[-1].times = 3
    assert torch.equal(model(x), plain(x))


def test_inputs_of_another_size_or_batch_make_the_same_joins() -> None:
    model, x = InlineAdd().eval(), picture()
    plain = copy.deepcopy(model)
    scale_skips(model, "cs", kappa=1.0, example_inputs=x)
    for shape in ((1, 3, 16, 16), (3, 3, 32, 8)):
        other = torch.randn(shape)
        assert torch.equal(model(other), plain(other))


def test_a_site_can_be_written_by_hand() -> None:
    model, x = InlineAdd().eval(), picture()
    found = scale_skips(copy.deepcopy(model), "cs", example_inputs=x)(x)
    sites = [SkipSite(i, "", Inline("add", part=1, number=3 - i, total=2), width=8) for i in (1, 2)]
    assert torch.equal(scale_skips(model, "cs", sites=sites)(x), found)


def test_an_inline_concatenation_that_two_layers_read_is_folded() -> None:
    model, x = TwoReaders().eval(), picture()
    scaled = scale_skips(model, "uniform", value=0.5, example_inputs=x)(x)
    torch.testing.assert_close(fuse_skips(model)(x), scaled)


def test_an_inline_sum_is_not_folded() -> None:
    model, _ = scaled_model("cs")
    with pytest.raises(ValueError, match="cannot be folded into weights: it is added to the trunk"):
        fuse_skips(model)


@pytest.mark.parametrize("way", ["function", "method"])
def test_compiling_the_network_itself_is_refused_with_the_reason(way: str) -> None:
    model, x = scaled_model("cs")
    compiled: Any = model
    if way == "function":
        compiled = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(ValueError, match="joins a scaled skip itself .* which torch.compile cannot follow"):
        compiled(x)


# Dynamo looks at .grad of whatever enters a graph while any mode of torch is active.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_the_modules_of_the_network_can_be_compiled() -> None:
    model, x = scaled_model("cs")
    expected = model(x)
    for module in model.children():
        module.compile(backend="eager")
    assert torch.equal(model(x), expected)


def test_tracing_a_network_that_is_scaled_inline_finds_the_same_sites() -> None:
    model, x = scaled_model("cs")
    assert find_skips(model, x) == find_skips(InlineAdd(), x)
