"""Scaling, replacing and undoing; and what is refused, with the model left as it was."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from families.small import Halve, decoder, images, uvit
from scalelong import (
    AbsorbedScalingWarning,
    Argument,
    Channels,
    SkipScaling,
    SkipSite,
    find_skips,
    fuse_skips,
    scale_skips,
    unscale_skips,
)
from scalelong.skips.methods import LS
from scalelong.theory.unet import TheoryUNet


def test_scaling_twice_replaces_and_never_stacks() -> None:
    model, inputs = uvit(), images()
    once = scale_skips(model, "cs", kappa=0.5)(*inputs)
    for method in ("ls", "norm", "cs"):
        scale_skips(model, method, **({"kappa": 0.5} if method == "cs" else {}))
    assert torch.equal(model(*inputs), once)
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == 3


def test_scaling_works_in_place_and_returns_the_model() -> None:
    model = uvit()
    assert scale_skips(model, "cs") is model
    assert unscale_skips(model) is model


def test_unscaling_a_plain_model_does_nothing() -> None:
    model, inputs = uvit(), images()
    before = model(*inputs)
    assert torch.equal(unscale_skips(model)(*inputs), before)


@pytest.mark.parametrize("method", [Halve, "instance"])
def test_a_scaling_of_ones_own_is_accepted_as_a_class_and_as_an_instance(method: object) -> None:
    model, inputs = uvit(), images()
    expected = scale_skips(model, "uniform", value=0.5)(*inputs)
    scale_skips(model, Halve(find_skips(model)) if method == "instance" else Halve)
    assert torch.equal(model(*inputs), expected)


def test_only_the_chosen_skips_are_scaled() -> None:
    model, inputs = uvit(), images()
    full = scale_skips(model, "cs", kappa=0.5)(*inputs)
    by_index = scale_skips(model, "cs", kappa=0.5, sites=[2, 3])(*inputs)
    assert torch.equal(by_index, full)  # kappa_1 is 1
    one = scale_skips(model, "cs", kappa=0.5, sites=[find_skips(model)[1]])(*inputs)
    assert not torch.equal(one, full)
    assert len(model.out_blocks[1]._forward_pre_hooks) == 1 and not model.out_blocks[0]._forward_pre_hooks


def test_a_site_written_by_hand_serves_a_model_that_no_rule_knows() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv2d(7, 4, 1)

        def forward(self, joined: Tensor) -> Tensor:
            return self.mix(joined)

    model, joined = nn.ModuleDict({"decoder": Decoder()}), torch.randn(2, 7, 3, 3)
    site = SkipSite(index=1, consumer="decoder", entry=Channels(2, 5), width=3)
    scale_skips(model, "uniform", value=0.25, sites=[site])
    scaled = joined.clone()
    scaled[:, 2:5] *= 0.25
    assert torch.equal(model["decoder"](joined), model["decoder"].mix(scaled))
    assert torch.equal(model["decoder"](joined=joined), model["decoder"].mix(scaled))


def test_the_input_tensors_are_never_changed_in_place() -> None:
    block, skip = TheoryUNet(8, 2), torch.randn(3, 8)
    scale_skips(block, "uniform", value=0.5)
    before = skip.clone()
    block.decoders[0](torch.randn(3, 8), skip)
    assert torch.equal(skip, before)


def test_a_scaled_checkpoint_refuses_to_load_into_an_unscaled_model_and_loads_into_a_scaled_one() -> None:
    model, inputs = scale_skips(uvit(), "cs", kappa=0.5), images()
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    with pytest.raises(RuntimeError, match="skip_scaling.coefficients"):
        uvit().load_state_dict(state)
    other = scale_skips(uvit(), "cs", kappa=0.9)
    other.load_state_dict(state)
    assert torch.equal(other(*inputs), model(*inputs))


@pytest.mark.parametrize("method", ["cs", "ls", "norm"])
def test_a_pickled_model_comes_back_scaled_and_can_be_unscaled(method: str) -> None:
    model, inputs = uvit(), images()
    plain = model(*inputs)
    scaled = scale_skips(model, method)(*inputs)
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy(*inputs), scaled)
    assert torch.equal(unscale_skips(copy)(*inputs), plain)


def test_the_scaling_follows_the_models_training_mode_and_precision() -> None:
    model = scale_skips(uvit().train().to(torch.bfloat16), "ls")
    assert model.skip_scaling.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    constants = scale_skips(model, "cs").skip_scaling.coefficients
    assert constants.dtype == torch.float32


SITE = SkipSite(1, "out_blocks.2", Argument(1, "skip"), width=17)


BAD_INPUT = [
    ({"method": "cs", "kappa": 0.0}, r"kappa must lie in \(0, 1\], got 0.0"),
    ({"method": "cs", "kappa": 1.2}, r"kappa must lie in \(0, 1\], got 1.2"),
    ({"method": "cs", "kappa": float("nan")}, "kappa must be a finite number, got nan"),
    ({"method": "cs", "kappa": "0.7"}, "kappa must be a finite number, got '0.7'"),
    ({"method": "cs", "kappa": True}, "kappa must be a finite number, got True"),
    ({"method": "cs", "kappa": 1e-50}, "so small that the innermost coefficient becomes 0"),
    ({"method": "cs-reversed", "kappa": 1e-20}, "so small that the outermost coefficient becomes 0"),
    ({"method": "learned-kappa", "init": -1.0}, r"init must lie in \(0, 1\], got -1.0"),
    ({"method": "uniform", "value": float("inf")}, "value must be a finite number"),
    ({"method": "uniform", "value": -1}, "value must be positive"),
    ({"method": "learnable", "init": None}, "init must be a finite number, got None"),
    ({"method": "CS"}, "unknown method 'CS'. Did you mean 'cs'"),
    ({"method": 5}, "unknown method 5"),
    ({"method": nn.Linear}, "unknown method"),
    ({"method": "cs", "sites": ["out_blocks.0"]}, "takes SkipSites, or indices of skips"),
    ({"method": "ls", "ratio": 0}, "ratio must be a positive integer"),
    ({"method": "ls", "activation": "gelu"}, "activation must be one of relu, elu, mish"),
    ({"method": "ls", "gate": "tokens"}, "gate must be 'width' or 'channels'"),
    ({"method": "ls", "init": 1.0}, "init must lie strictly between 0 and 1"),
    ({"method": "learnable", "init": float("nan")}, "init must be a finite number"),
    ({"method": "ls-indvidual"}, "unknown method 'ls-indvidual'. Did you mean 'ls-individual'"),
    ({"method": "cs", "kapa": 0.5}, "has no option 'kapa'. Its options: kappa. Did you mean 'kappa'"),
    ({"method": "none", "kappa": 0.5}, "has no option 'kappa'. Its options: none"),
    ({"method": "cs", "where": "output"}, "where must be"),
    ({"method": "cs", "sites": [4]}, "there is no skip 4; this model has skips 1 .* to 3"),
    ({"method": "cs", "sites": []}, "scales nothing"),
    ({"method": "cs", "sites": [SITE, SITE]}, "two sites on one skip"),
    ({"method": "cs", "sites": [SITE, replace(SITE, index=2)]}, "two sites on one skip"),
    ({"method": "cs", "sites": [SITE, replace(SITE, consumer="out_blocks.0")]}, "two sites on one skip"),
    ({"method": "cs", "sites": [SITE, replace(SITE, index=2, entry=Argument(name="skip"))]}, "two sites on one skip"),
    ({"method": "cs", "sites": [SITE, replace(SITE, index=2, entry=Argument(position=1))]}, "two sites on one skip"),
    ({"method": "cs", "sites": [replace(SITE, consumer="out_blocks.9")]}, "does not have"),
    ({"method": "cs", "sites": [SITE], "where": "after-norm"}, "needs to know what reads skip 1"),
    ({"method": "ls", "preserve": True}, "depend on the input"),
    ({"method": "learnable", "init": 0.0, "preserve": True}, "cannot divide weights by a coefficient of 0"),
]


@pytest.mark.parametrize("scaled_before", [False, True])
@pytest.mark.parametrize("call, message", BAD_INPUT)
def test_bad_input_is_explained_and_leaves_the_model_as_it_was(call: dict, message: str, scaled_before: bool) -> None:
    model, inputs = uvit(), images()
    if scaled_before:
        scale_skips(model, "uniform", value=0.5)
    before, state = model(*inputs), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        scale_skips(model, **call)
    assert torch.equal(model(*inputs), before)
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_overlapping_channels_of_one_consumer_are_two_sites_on_one_skip() -> None:
    model = nn.ModuleDict({"mix": nn.Conv2d(8, 4, 1)})
    sites = [SkipSite(1, "mix", Channels(0, 5), 5), SkipSite(2, "mix", Channels(4, 8), 4)]
    with pytest.raises(ValueError, match="two sites on one skip"):
        scale_skips(model, "cs", sites=sites)


def test_a_scaling_with_nan_coefficients_is_refused() -> None:
    class Broken(Halve):
        def constants(self) -> Tensor:
            return torch.full((self.num_skips,), float("nan"))

    with pytest.raises(ValueError, match="one finite coefficient for each of 3 skips"):
        scale_skips(uvit(), Broken)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = uvit()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(x, t)


def test_scaling_through_a_wrapper_belongs_to_the_network_inside() -> None:
    wrapper, inputs = Wrapper().eval(), images()
    plain = wrapper(*inputs)
    scaled = scale_skips(wrapper, "ls")(*inputs)
    twin = copy.deepcopy(wrapper.net)
    assert any(name.startswith("skip_scaling.") for name, _ in twin.named_parameters())
    with pytest.raises(RuntimeError, match="skip_scaling"):
        uvit().load_state_dict(wrapper.net.state_dict())
    assert torch.equal(twin(*inputs), scaled)
    assert torch.equal(unscale_skips(twin)(*inputs), plain)
    scale_skips(wrapper.net, "cs")
    assert torch.equal(unscale_skips(wrapper)(*inputs), plain)


def test_a_model_that_is_already_scaled_through_a_parent_is_refused() -> None:
    wrapper, inputs = Wrapper().eval(), images()
    plain = wrapper(*inputs)
    scale_skips(wrapper, "cs", sites=find_skips(wrapper))
    for verb in (unscale_skips, fuse_skips, lambda model: scale_skips(model, "cs")):
        with pytest.raises(ValueError, match="already scaled through another module, which holds it"):
            verb(wrapper.net)
    scale_skips(wrapper, "cs")
    assert torch.equal(unscale_skips(wrapper.net)(*inputs), plain)


def test_a_model_with_an_attribute_of_that_name_is_refused() -> None:
    model = uvit()
    model.skip_scaling = nn.Identity()
    with pytest.raises(ValueError, match="already has an attribute 'skip_scaling'"):
        scale_skips(model, "cs")


def test_two_models_in_one_wrapper_are_ambiguous() -> None:
    with pytest.raises(ValueError, match="holds 2 models with long skips"):
        find_skips(nn.ModuleDict({"net": uvit(), "ema": uvit()}))


def test_a_namesake_that_is_built_differently_is_not_taken_for_a_known_family() -> None:
    class SongUNet(nn.Module):
        pass

    with pytest.raises(ValueError, match="no long skip connections found in SongUNet"):
        find_skips(SongUNet())


def test_a_consumer_called_without_its_skip_says_so() -> None:
    model = scale_skips(uvit(), "cs")
    with pytest.raises(ValueError, match="was called without skip"):
        model.out_blocks[0](torch.randn(1, 17, 32))


def test_a_gate_is_shared_by_all_skips_of_a_uvit() -> None:
    scaling = scale_skips(uvit(), "ls").skip_scaling
    assert isinstance(scaling, LS) and len(scaling.gates) == 1


@pytest.mark.parametrize("kappa", [1, np.float32(0.5), np.float64(0.5), torch.tensor(0.5)])
def test_constants_are_float32_whatever_number_they_were_given_as(kappa: float) -> None:
    model = scale_skips(uvit(), "cs", kappa=kappa)
    assert model.skip_scaling.coefficients.dtype == torch.float32
    other = scale_skips(uvit(), "cs", kappa=0.7)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.skip_scaling.coefficients, other.skip_scaling.coefficients)


@pytest.mark.parametrize("method, option", [("uniform", "value"), ("learnable", "init"), ("norm", "init")])
def test_a_whole_number_is_a_number(method: str, option: str) -> None:
    state = scale_skips(uvit(), method, **{option: 1}).skip_scaling.state_dict()
    assert {value.dtype for name, value in state.items() if name != "signature"} == {torch.float32}


def test_sites_may_be_any_iterable() -> None:
    model = uvit()
    scale_skips(model, "cs", sites=(index for index in (1, 2)))
    assert [len(block._forward_pre_hooks) for block in model.out_blocks] == [0, 1, 1]
    scale_skips(model, "cs", sites=iter(find_skips(model)))
    assert [len(block._forward_pre_hooks) for block in model.out_blocks] == [1, 1, 1]


def test_reversed_scaling_of_some_skips_counts_all_of_them() -> None:
    full = scale_skips(uvit(), "cs-reversed", kappa=0.5).skip_scaling.coefficients
    some = scale_skips(uvit(), "cs-reversed", kappa=0.5, sites=[1, 2]).skip_scaling.coefficients
    assert torch.equal(some, full[:2])


def test_a_shared_block_is_one_consumer() -> None:
    model = uvit()
    model.out_blocks[1] = model.out_blocks[0]
    with pytest.raises(ValueError, match="two sites on one skip"):
        scale_skips(model, "cs")


def test_a_hand_written_site_whose_reader_is_a_norm_is_scaled_after_it() -> None:
    model, sites = decoder(nn.GroupNorm(2, 8))
    joined = torch.randn(2, 8, 5, 5)
    expected = model["decoder"](joined).clone()
    expected[:, 4:] *= 0.5
    scale_skips(model, "uniform", value=0.5, sites=sites, where="after-norm")
    assert torch.equal(model["decoder"](joined), expected)
    with pytest.warns(AbsorbedScalingWarning):
        scale_skips(model, "uniform", value=0.5, sites=sites)


def test_ls_after_a_norm_weighs_what_came_before_it() -> None:
    model, sites = decoder(nn.GroupNorm(2, 8))
    joined = torch.randn(2, 8, 5, 5) + torch.arange(8.0)[:, None, None]
    expected = model["decoder"](joined).clone()
    scale_skips(model, "ls", sites=sites, where="after-norm", ratio=1)
    expected[:, 4:] *= model.skip_scaling.coefficient(1, joined[:, 4:])
    torch.testing.assert_close(model["decoder"](joined), expected)


def test_a_concatenated_input_in_half_precision_stays_in_half_precision() -> None:
    model, sites = decoder(nn.Identity())
    for method in ("cs", "ls", Vector):
        scale_skips(model, method, sites=sites)
        assert model["decoder"](torch.randn(2, 8, 5, 5).bfloat16()).dtype == torch.bfloat16


class Vector(SkipScaling):
    def coefficient(self, index: int, skip: Tensor) -> Tensor:
        return torch.full((1, skip.shape[1], *[1] * (skip.ndim - 2)), 0.5)


def test_a_vector_of_float32_coefficients_does_not_promote_a_half_precision_skip() -> None:
    model, (x, t) = scale_skips(uvit().bfloat16(), Vector), images()
    assert model(x.bfloat16(), t).dtype == torch.bfloat16


def test_a_coefficient_may_be_a_plain_number() -> None:
    class Plain(Halve):
        def coefficient(self, index: int, skip: Tensor) -> float:
            return 0.5

    model, inputs = uvit(), images()
    expected = scale_skips(model, Halve)(*inputs)
    assert torch.equal(scale_skips(model, Plain)(*inputs), expected)


def test_an_instance_made_for_fewer_skips_is_refused() -> None:
    model = uvit()
    with pytest.raises(ValueError, match="was made for 2 skips, but skip 3 is to be scaled"):
        scale_skips(model, Halve(find_skips(model)[:2]))


def test_pooling_is_computed_in_float32_from_a_half_precision_skip() -> None:
    scaling, skip = scale_skips(uvit(), "ls").skip_scaling, torch.randn(2, 17, 32).half()
    assert torch.equal(scaling.coefficient(1, skip), scaling.coefficient(1, skip.float()).half())


MISMATCHES = [
    ({"method": "ls"}, {"method": "ls", "activation": "mish"}),
    ({"method": "cs"}, {"method": "uniform"}),
    ({"method": "cs"}, {"method": "cs", "sites": [3]}),
]


@pytest.mark.parametrize("saved, loaded", MISMATCHES)
def test_weights_of_another_scaling_are_refused_by_name(saved: dict, loaded: dict) -> None:
    state = scale_skips(uvit(), **saved).state_dict()
    with pytest.raises(RuntimeError, match="the weights were scaled as '.*', this model as '.*'"):
        scale_skips(uvit(), **loaded).load_state_dict(state)


def test_even_a_scaling_without_state_leaves_its_mark_in_the_checkpoint() -> None:
    with pytest.raises(RuntimeError, match="skip_scaling.signature"):
        uvit().load_state_dict(scale_skips(uvit(), Halve).state_dict())


def test_a_model_scaled_in_inference_mode_can_be_trained_afterwards() -> None:
    model, inputs = uvit(), images()
    with torch.inference_mode():
        scale_skips(model, "ls")
    model(*inputs).sum().backward()
    assert model.skip_scaling.gates["width17"].excite.weight.grad is not None


def test_a_real_model_can_be_scaled_while_another_device_is_the_default() -> None:
    model, inputs = uvit(), images()
    with torch.device("meta"):
        scale_skips(model, "cs", kappa=0.5)
    assert model(*inputs).device.type == "cpu"


def test_a_refused_call_leaves_the_order_of_all_hooks_as_it_was() -> None:
    model = scale_skips(uvit(), "cs")
    block = model.out_blocks[0]
    block.register_forward_pre_hook(lambda module, args: None)
    before = list(block._forward_pre_hooks)
    with pytest.raises(ValueError):
        scale_skips(model, "cs", kappa=7)
    assert list(block._forward_pre_hooks) == before


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a torch module; of a pipeline pass its network"):
        scale_skips(object(), "cs")
