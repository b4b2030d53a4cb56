"""Every join that reaches past the bottleneck is a skip or is named: the joins that are easily missed."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families.crossing import (
    Balanced,
    ChannelsLast,
    Injected,
    JoiningBlock,
    Levels,
    NestedSkips,
    NoMiddle,
    OneResidual,
    PushedTwice,
    SideBySide,
    Waves,
    adding_levels,
)
from families.oracle import Join, run_scaled
from families.unknown import conv_block, double, halve
from scalelong import Argument, Channels, Inline, SkipSite, find_skips, fuse_skips, scale_skips, unscale_skips


def picture() -> Tensor:
    return torch.randn(2, 3, 16, 16)


def places(model: nn.Module, inputs: Any = None) -> list[tuple[str, Any]]:
    return [(site.consumer, site.entry) for site in find_skips(model, picture() if inputs is None else inputs)]


def sums(*numbers: int, of: int) -> list[tuple[str, Inline]]:
    return [("", Inline("add", 1, number, of)) for number in numbers]


CAT = Channels(8, 16)


@pytest.mark.parametrize("attention", [False, True])
def test_a_tensor_that_is_put_twice_onto_the_stack_of_skips_is_two_skips(attention: bool) -> None:
    ups = [(f"up.{i}", CAT) for i in (3, 2, 1, 0)]
    assert places(PushedTwice(attention)) == [("last", CAT), *ups]


def test_a_tensor_that_is_joined_with_itself_is_a_skip_as_its_siblings_are() -> None:
    assert places(NoMiddle()) == [(f"norms.{i}", Channels(12, 24, dim=-1)) for i in (2, 1, 0)]


def test_sums_and_concatenations_are_found_together() -> None:
    inner = [("", Inline("add", 1, 2, 2)), ("", Inline("add", 1, 1, 2))]
    assert places(Levels("add", "add", "cat")) == [("up.2", CAT), *inner]
    assert places(Levels("cat", "add", "cat")) == [("up.2", CAT), *sums(1, of=1), ("up.0", CAT)]
    assert places(Levels("cat", "cat", "add")) == [*sums(1, of=1), ("up.1", CAT), ("up.0", CAT)]


def test_an_interpolation_between_skip_and_trunk_is_a_join() -> None:
    assert places(Levels("lerp", "lerp")) == [("", Inline("add", 0, number, 2)) for number in (2, 1)]
    sites = find_skips(ChannelsLast().eval(), picture())
    assert [(site.consumer, site.entry) for site in sites] == [(f"mix.{i}", Argument(1, "skip")) for i in (1, 0)]


def test_one_residual_around_the_whole_network_is_no_skip() -> None:
    assert places(Levels("cat", "cat", residual=True)) == [("up.1", CAT), ("up.0", CAT)]
    with pytest.raises(ValueError, match="no long skip connections found in OneResidual.* joins nothing from before a"):
        find_skips(OneResidual(), picture())


def test_sums_in_modules_that_hold_one_another_are_skips() -> None:
    assert places(adding_levels()) == [("1", Inline("add", 0, 1, 1)), ("1.inner", Inline("add", 0, 1, 1))]


def test_of_nested_skips_those_past_the_bottleneck_are_long() -> None:
    assert places(NestedSkips(inline=False)) == [("x02", Argument(1, "skip")), ("x11", Argument(1, "skip"))]
    inline = [("x02.conv", CAT), ("x02.conv", Channels(16, 24)), ("x11.conv", CAT)]
    assert places(NestedSkips(inline=True)) == inline


class Woven(NestedSkips):
    """UNet++ of three levels, whose outer skips go through blocks of all levels below."""

    def __init__(self) -> None:
        super().__init__(inline=False)
        self.x30, self.x21, self.x12 = conv_block(8, 8), JoiningBlock(2), JoiningBlock(3)
        self.x03 = JoiningBlock(4)

    def forward(self, x: Tensor) -> Tensor:
        x00 = self.x00(x)
        x10 = self.x10(halve(x00))
        x20 = self.x20(halve(x10))
        x21 = self.x21(self.x30(halve(x20)), x20)
        x01, x11 = self.x01(x10, x00), self.x11(x20, x10)
        x02, x12 = self.joined(self.x02, x11, x00, x01), self.joined(self.x12, x21, x10, x11)
        return self.head(self.joined(self.x03, x12, x00, x01, x02))


def test_skips_that_are_woven_into_one_another_are_an_error_that_names_them() -> None:
    with pytest.raises(ValueError, match="woven into one another: a|two networks with long skips: one with a"):
        find_skips(Woven().eval(), picture())


class SideOutputs(Levels):
    """The features of every level behind the bottleneck, that of the bottleneck too, are joined for the output."""

    def __init__(self) -> None:
        super().__init__("cat", "cat")
        self.head = nn.Conv2d(24, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        size, kept, x = x.shape[-2:], [], self.stem(x)
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = halve(x)
        outputs = [self.middle(x)]
        for up in self.up:
            outputs.append(up(torch.cat([double(outputs[-1]), kept.pop()], 1)))
        return self.head(torch.cat([nn.functional.interpolate(output, size) for output in outputs], 1))


def test_outputs_of_every_level_behind_the_bottleneck_that_are_joined_at_the_end_are_no_skips() -> None:
    assert places(SideOutputs()) == [("up.1", CAT), ("up.0", CAT)]


@pytest.mark.parametrize("shared", [False, True])
def test_two_networks_side_by_side_are_an_error_that_names_both(shared: bool) -> None:
    with pytest.raises(ValueError, match=r"two networks with long skips: one with .*, another with .* sites="):
        find_skips(SideBySide(shared), picture())


def test_a_tensor_that_every_decoder_block_reads_is_an_error_unless_it_is_the_raw_input(caplog: Any) -> None:
    with pytest.raises(ValueError, match="one tensor is joined 2 times past the bottleneck, last by a concatenation"):
        find_skips(Injected(raw=False), picture())
    with caplog.at_level(logging.WARNING):
        assert places(Injected(raw=True)) == [(f"u.{i}", CAT) for i in (2, 1, 0)]
    assert "the raw input is joined 3 times and not scaled" in caplog.text


def test_the_skips_of_such_a_network_can_be_given_by_hand() -> None:
    model, x = Injected(raw=False).eval(), picture()
    sites = [SkipSite(i, f"u.{3 - i}", CAT, width=8) for i in (1, 2, 3)]
    assert not torch.equal(scale_skips(copy.deepcopy(model), "uniform", sites=sites)(x), model(x))


def test_a_module_that_runs_as_often_as_there_are_skips_is_scaled_behind_its_join() -> None:
    assert places(Balanced()) == [("e", CAT), ("d", Channels(12, 24))]


# --- what is scaled is the skip, at its join, and nothing else


ORACLES: list[tuple[Any, Join]] = [
    (PushedTwice, Join("", after="middle")),
    (lambda: PushedTwice(attention=True), Join("", after="middle")),
    (NoMiddle, Join("")),
    (lambda: Levels("add", "add", "add"), Join("", op="add")),
    (adding_levels, Join(r"1(\.inner)?", op="add", skip_at=0)),
    (lambda: NestedSkips(inline=False), Join(r"x11|x02")),
]


def run(model: nn.Module, x: Any) -> Tensor:
    return model(x)


@pytest.mark.parametrize("build, join", ORACLES)
def test_every_skip_is_multiplied_by_its_own_coefficient_where_it_is_joined(build: Any, join: Join) -> None:
    model, x = build().eval(), picture()
    count = len(find_skips(model, x))
    before, wanted = model(x), run_scaled(model, x, run, join, [0.6**i for i in range(count)])
    scaled = scale_skips(copy.deepcopy(model), "cs", kappa=0.6, example_inputs=x)
    assert not torch.equal(scaled(x), before)
    torch.testing.assert_close(scaled(x), wanted, rtol=1e-5, atol=1e-6)  # a balanced product rounds otherwise
    assert torch.equal(unscale_skips(scaled)(x), before)


def test_magnitude_preserving_joins_are_scaled_as_the_skip_before_them() -> None:
    model, x = Balanced().eval(), picture()
    by_hand = copy.deepcopy(model)
    by_hand.join.register_forward_pre_hook(lambda module, args: (args[0], args[1] * 0.5))
    scaled = scale_skips(model, "uniform", value=0.5, example_inputs=x)(x)
    torch.testing.assert_close(scaled, by_hand(x))


# --- what sites say besides


def test_a_number_by_which_the_network_scales_its_skips_itself_is_seen() -> None:
    factors = [site.factor for site in find_skips(PushedTwice(), picture())]
    assert factors == [1.0] + [2**-0.5] * 4
    assert all(site.factor == 1.0 for site in find_skips(Balanced(), picture()))


@pytest.mark.parametrize("method", ["ls", "ie", "ls-individual"])
def test_gates_of_a_network_that_takes_any_length_do_not_depend_on_it(method: str) -> None:
    model = scale_skips(Waves(), method, example_inputs=torch.randn(2, 10, 1))
    for length in (10, 7, 33):
        model(torch.randn(2, length, 1)).sum().backward()
    assert {gate.width for gate in model.skip_scaling.gates.values()} == {12}


def test_gates_of_a_network_with_learned_positions_weigh_its_tokens_as_in_the_paper() -> None:
    learned = scale_skips(NoMiddle(positions=16), "ls", example_inputs=picture())
    assert [gate.width for gate in learned.skip_scaling.gates.values()] == [16]
    free = scale_skips(NoMiddle(positions=None), "ls", example_inputs=picture())
    assert [gate.width for gate in free.skip_scaling.gates.values()] == [24 // 2]


def test_features_that_have_their_channels_last_are_weighed_by_channel_also_in_a_sum() -> None:
    model = scale_skips(ChannelsLast(), "ls", example_inputs=picture())
    assert [gate.width for gate in model.skip_scaling.gates.values()] == [12]
    model(torch.randn(1, 3, 8, 24))


# --- a class that rebuilds itself when it is copied


def rebuild(kind: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    model = kind.__new__(kind)
    model.__dict__.update(state)
    return model


class Persistent(Levels):
    """As a class whose objects are pickled with their source: a copy is made anew from the state."""

    def __reduce__(self) -> Any:
        return rebuild, (type(self), self.__dict__)


@pytest.mark.parametrize("joins", [("cat", "cat"), ("add", "add")])
def test_a_copy_of_a_network_that_rebuilds_itself_is_scaled_unscaled_and_fused_like_any_other(joins: Any) -> None:
    model, x = Persistent(*joins).eval(), picture()
    plain = model(x)
    expected = scale_skips(model, "uniform", value=0.5, example_inputs=x)(x)
    for _ in range(2):
        again = copy.deepcopy(model)
        assert torch.equal(again(x), expected)
        assert torch.equal(unscale_skips(copy.deepcopy(again))(x), plain)
        model = scale_skips(again, "uniform", value=0.5, example_inputs=x)
    if "cat" in joins:
        torch.testing.assert_close(fuse_skips(copy.deepcopy(model))(x), expected)
    assert torch.equal(model(x), expected)
