"""Long skips found by tracing one forward pass, in models that no rule knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families.family import Family
from families.joining import (
    Branching,
    Conditioned,
    Dense,
    Embedded,
    Gated,
    Growing,
    KeywordAdds,
    Pix2Pix,
    Pooled,
    Preallocated,
    Refined,
    Repeating,
    Residual,
    RunTwice,
    SharedConcat,
    Shell,
    TwoAtOnce,
    UNet,
    UNetOfUNets,
)
from families.unknown import conv_block
from families.zoo import FAMILIES, NOT_UNETS, UNKNOWN
from scalelong import find_skips, scale_skips
from scalelong.skips.site import Argument, Channels, Entry, Inline
from scalelong.skips.trace import trace_skips


def picture() -> Tensor:
    return torch.randn(2, 3, 16, 16)


def places(model: nn.Module, inputs: Any = None) -> list[tuple[str, Entry]]:
    """Consumer and entry of every site, outermost first."""
    sites = trace_skips(model, picture() if inputs is None else inputs)
    return [(site.consumer, site.entry) for site in sites]


# --- agreement with what is known otherwise


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_tracing_a_known_family_finds_exactly_the_sites_of_its_rule(family: Family) -> None:
    model, inputs = family.tiny()
    assert trace_skips(model, inputs) == find_skips(model)


@pytest.mark.parametrize("family", UNKNOWN, ids=str)
def test_scaling_traced_sites_multiplies_each_skip_at_its_join(family: Family) -> None:
    model, inputs = family.tiny()
    by_hand = family.run_scaled(model, inputs, [0.6**i for i in range(family.num_skips)])
    sites = trace_skips(model, inputs)
    assert [site.width for site in sites] == list(family.widths)
    assert torch.equal(family.run(scale_skips(model, "cs", kappa=0.6, sites=sites), inputs), by_hand)


@pytest.mark.parametrize("family", NOT_UNETS, ids=str)
def test_a_model_without_long_skips_has_no_sites(family: Family) -> None:
    model, inputs = family.tiny()
    assert trace_skips(model, inputs) == []


UNKNOWN_PLACES = {
    "inline-cat": [("up1", Channels(8, 16)), ("up2", Channels(16, 32)), ("up3", Channels(24, 48))],
    "cat-blocks": [(f"rises.{i}", Argument(1, "skip")) for i in (2, 1, 0)],
    "list-of-skips": [("decoder", Argument(1, "features", item)) for item in (-2, -1)],
    "recursive": [("head", Channels(0, 8)), ("levels.up", Channels(0, 12))],
    "add-blocks": [(f"rises.{i}", Argument(1, "skip")) for i in (2, 1, 0)],
    "tokens": [(f"late.{i}", Argument(1, "residual")) for i in (2, 1, 0)],
    "wrapped-skip-first": [("unet.e", Channels(0, 8)), ("unet.d", Channels(0, 12))],
    "lateral": [("up1", Channels(8, 16)), ("up2", Channels(16, 20))],
    "inline-add": [("", Inline("add", 1, 2, 2)), ("", Inline("add", 1, 1, 2))],
}


@pytest.mark.parametrize("family", UNKNOWN, ids=str)
def test_a_skip_enters_as_the_argument_it_is_given_by_else_as_channels_of_what_reads_the_join(
    family: Family,
) -> None:
    assert places(*family.tiny()) == UNKNOWN_PLACES[family.name]


def test_sites_say_what_reads_the_joined_features() -> None:
    by_name = {family.name: family for family in UNKNOWN}
    first = {name: trace_skips(*by_name[name].tiny())[0] for name in ("cat-blocks", "tokens", "add-blocks")}
    assert first["cat-blocks"].readers == ("rises.2.conv.0",) and first["cat-blocks"].joined == Channels(8, 16)
    assert first["tokens"].readers == ("late.2.fuse",) and first["tokens"].joined == Channels(12, 24, dim=-1)
    assert first["add-blocks"].readers == () and first["add-blocks"].joined is None


# --- other ways to join


INLINE = [("e", Channels(8, 16)), ("d", Channels(8, 16))]


@pytest.mark.parametrize("model", [UNet, SharedConcat, Gated, Preallocated, Branching, UNetOfUNets])
def test_skips_are_found_however_the_decoder_joins_them(model: type[nn.Module]) -> None:
    assert places(model()) == INLINE


def test_two_skips_of_one_join_are_two_sites() -> None:
    assert places(TwoAtOnce()) == [("e", Channels(16, 24)), ("e", Channels(8, 16))]


def test_the_skips_of_a_unet_come_before_a_single_one_around_it() -> None:
    assert places(Refined()) == [(f"unet.{name}", entry) for name, entry in INLINE]


def test_a_condition_that_is_concatenated_is_no_skip() -> None:
    assert places(Embedded(), (picture(), torch.rand(2))) == INLINE
    assert places(Conditioned(), (picture(), picture())) == INLINE


def test_inputs_may_be_a_tensor_positional_or_keyword_arguments_in_any_order() -> None:
    model, x = Conditioned(), picture()
    assert trace_skips(model, (x, x.clone())) == trace_skips(model, {"hint": x.clone(), "x": x})
    assert trace_skips(UNet(), x) == trace_skips(UNet(), (x,))
    with pytest.raises(ValueError, match="example_inputs is a str. Pass a tensor, a tuple"):
        trace_skips(model, "x")


def test_a_skip_that_is_projected_and_added_inside_a_block_enters_as_its_argument() -> None:
    assert places(KeywordAdds()) == [(name, Argument(name="shortcut")) for name in ("e", "d")]


def test_skips_of_recursive_blocks_with_activations_in_place_are_found() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Pix2Pix(Pix2Pix(Pix2Pix(None))), nn.Conv2d(16, 3, 1))
    consumers = ["2", "1.model.3", "1.model.2.model.3"]
    assert places(model) == [(consumer, Channels(0, 8)) for consumer in consumers]


def test_a_block_that_runs_again_with_the_same_skip_is_one_site() -> None:
    assert places(Repeating()) == [("e", Argument(1, "skip")), ("d", Argument(1, "skip"))]


def test_readers_come_in_the_models_order_and_a_norm_among_them_absorbs() -> None:
    outermost = trace_skips(Repeating(), picture())[0]
    assert outermost.readers == ("e.norm", "e.short") and outermost.absorbed


# --- no long skips


def stack(*blocks: nn.Module, out: int = 8) -> nn.Module:
    return nn.Sequential(conv_block(3, 8), *blocks, nn.Conv2d(out, 3, 1))


@pytest.mark.parametrize(
    "model",
    [
        stack(Dense(), nn.AvgPool2d(2), Dense()),
        stack(Growing(8), Growing(16), nn.AvgPool2d(2), Growing(24), out=32),
        stack(Dense(6)),
        stack(*[Residual() for _ in range(4)]),
        stack(Shell(conv_block(8, 8), Shell(conv_block(8, 8), Shell(conv_block(8, 8))))),
        stack(Shell(conv_block(8, 8), conv_block(8, 8))),
        stack(*[Pooled() for _ in range(4)]),
    ],
    ids=["dense lists", "dense layers", "one dense list", "residuals", "nested residuals", "one residual", "branches"],
)
def test_joins_within_blocks_are_no_long_skips(model: nn.Module) -> None:
    assert trace_skips(model, picture()) == []


# --- skips that no hook can reach


def test_a_network_that_runs_twice_in_one_pass_is_an_error_that_names_the_module() -> None:
    message = r"enters 'unet\.d' \(Sequential\) through channels 8:16, but that module is called 2 times"
    with pytest.raises(ValueError, match=message):
        trace_skips(RunTwice(), picture())


# --- the model is left as it was


class Fragile(UNet):
    """Draws noise, counts its calls in two buffers, normalises by batch, and can be made to fail at the end."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.c.append(nn.BatchNorm2d(8))
        self.c.append(nn.Dropout(0.5))
        self.b.eval()
        self.count: Tensor
        self.total: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise AssertionError("the model was traced in training mode")
        self.count += 1
        self.total = self.total + 1
        output = super().forward(x + torch.randn_like(x))
        if self.fails:
            raise RuntimeError("the forward failed")
        return output


def state_of(model: nn.Module) -> list[Any]:
    """Everything that tracing could disturb, in a form that compares with ==."""
    tensors = [(name, id(tensor), tensor.tolist()) for name, tensor in model.state_dict(keep_vars=True).items()]
    modes = [module.training for module in model.modules()]
    hooks = [(*module._forward_pre_hooks, *module._forward_hooks) for module in model.modules()]
    flags = [(*m._forward_pre_hooks_with_kwargs, *m._forward_hooks_with_kwargs) for m in model.modules()]
    return [tensors, modes, hooks, flags, torch.get_rng_state().tolist(), torch.is_grad_enabled()]


@pytest.mark.parametrize("fails", [False, True])
def test_tracing_leaves_weights_buffers_modes_hooks_and_random_state_as_they_were(fails: bool) -> None:
    model, x = Fragile().train(), picture()
    model.b.eval()
    model.head.register_forward_pre_hook(lambda module, args: None)
    model.fails = fails
    before = state_of(model)
    if fails:
        with pytest.raises(RuntimeError, match="the forward failed"):
            trace_skips(model, x)
    else:
        assert len(trace_skips(model, x)) == 2
    assert state_of(model) == before


def test_tracing_needs_no_memory_for_weights_or_activations_on_the_meta_device() -> None:
    assert places(UNet().to("meta"), picture().to("meta")) == INLINE


class Refining(nn.Module):
    """A shallow UNet whose skips pass through a network of their own on their way."""

    def __init__(self, refine: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.outer, self.inner = refine(8), refine(16)
        self.up, self.last = JoiningBlock(48, 16), JoiningBlock(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        return self.last(self.up(self.middle(second), self.inner(second)), self.outer(first))


class JoiningBlock(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        larger = nn.functional.interpolate(x, scale_factor=2)
        return self.conv(torch.cat([larger, skip], dim=1)).relu()


class ResidualPath(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (layer(x) + x).relu()
        return x


class ChannelGate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mix(x.mean((2, 3))).sigmoid()[:, :, None, None]


@pytest.mark.parametrize("refine", [ResidualPath, ChannelGate])
def test_a_skip_that_is_refined_on_its_way_is_not_taken_for_the_trunk(refine: type[nn.Module]) -> None:
    sites = trace_skips(Refining(refine), picture())
    assert [(site.consumer, str(site.entry), site.width) for site in sites] == [("last", "skip", 8), ("up", "skip", 16)]


@pytest.mark.parametrize("method", ["cs", "ls", "norm"])
def test_tracing_a_scaled_model_again_finds_the_same_sites(method: str) -> None:
    model = Refining(ResidualPath).eval()
    before = find_skips(model, picture())
    scale_skips(model, method, example_inputs=picture())
    assert find_skips(model, picture()) == before
    assert len(model.up._forward_pre_hooks) == 1
