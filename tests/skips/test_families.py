"""Laws that hold for every model family that scalelong knows."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from families.family import Family, cases
from families.oracle import skips_seen
from families.zoo import FAMILIES, NOT_UNETS
from scalelong import AbsorbedScalingWarning, SkipScaling, find_skips, fuse_skips, scale_skips, unscale_skips


def each(families: list[Family]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", cases(families), ids=str)


every_family = each(FAMILIES)
ignore_absorption = pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")


def scaling_in(model: nn.Module) -> Any:
    """The scaling of a model, which belongs to the network inside if the model wraps one."""
    return next(module for module in model.modules() if isinstance(module, SkipScaling))


@every_family
def test_every_long_skip_is_found_once_in_order_with_its_width_and_whether_a_norm_absorbs_it(family: Family) -> None:
    model, inputs = family.tiny()
    sites = find_skips(model)
    joined = family.joins(model, inputs)
    seen = skips_seen(model, sites, inputs, family.run)
    assert [site.index for site in sites] == list(range(1, family.num_skips + 1))
    assert [site.width for site in sites] == list(family.widths)
    assert {site.absorbed for site in sites} == {family.absorbed}
    assert len(joined) == len(sites)
    for site, join in zip(sites, reversed(joined), strict=True):
        assert torch.equal(seen[site.index - 1], join.skip)
        assert site.width == join.skip.shape[1]
        assert site.channels == join.skip.shape[site.channel_dim]


@every_family
@ignore_absorption
def test_constant_scaling_multiplies_each_skip_at_its_join_by_its_own_coefficient(family: Family) -> None:
    model, inputs = family.tiny()
    by_hand = family.run_scaled(model, inputs, [0.6**i for i in range(family.num_skips)])
    plain = family.run(model, inputs)
    scaled = family.run(scale_skips(model, "cs", kappa=0.6), inputs)
    assert torch.equal(scaled, by_hand)
    assert family.num_skips == 1 or not torch.equal(scaled, plain)


@every_family
def test_a_coefficient_of_one_changes_nothing_to_the_bit(family: Family) -> None:
    model, inputs = family.tiny()
    before = family.run(model, inputs)
    for method, options in (("cs", {"kappa": 1.0}), ("learnable", {"init": 1.0}), ("none", {})):
        scale_skips(model, method, **options)
        assert torch.equal(family.run(model, inputs), before), method


@every_family
@ignore_absorption
def test_unscaling_restores_the_original_output_exactly(family: Family) -> None:
    model, inputs = family.tiny()
    before, names = family.run(model, inputs), list(model.state_dict())
    for method in ("cs", "ls", "norm"):
        scale_skips(model, method)
    unscale_skips(model)
    assert torch.equal(family.run(model, inputs), before)
    assert list(model.state_dict()) == names


@every_family
@ignore_absorption
def test_a_deep_copy_is_scaled_by_its_own_copy_of_the_method(family: Family) -> None:
    model, inputs = family.tiny()
    scale_skips(model, "uniform", value=0.5)
    scaled = family.run(model, inputs)
    twin = copy.deepcopy(model)
    scaling_in(model).coefficients.fill_(1.0)
    assert torch.equal(family.run(twin, inputs), scaled)
    assert not torch.equal(family.run(model, inputs), scaled)


@every_family
def test_every_parameter_of_a_learned_method_gets_a_gradient(family: Family) -> None:
    model, inputs = family.tiny()
    # A narrow ReLU may be dead at the start; ELU never is.
    for method, options in (("ls", {"ratio": 2, "activation": "elu"}), ("norm", {})):
        scale_skips(model, method, **options)
        family.run_with_gradients(model, inputs).square().mean().backward()
        for name, parameter in scaling_in(model).named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, (method, name)


@every_family
@ignore_absorption
def test_fusing_keeps_the_function_or_says_why_it_cannot(family: Family) -> None:
    model, inputs = family.tiny()
    names = list(model.state_dict())
    scale_skips(model, "cs", kappa=0.8)
    scaled = family.run(model, inputs)
    if family.fuses and not family.absorbed:
        fuse_skips(model)
        assert list(model.state_dict()) == names
        torch.testing.assert_close(family.run(model, inputs), scaled, rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(ValueError, match="cannot be folded"):
            fuse_skips(model)
        assert torch.equal(family.run(model, inputs), scaled)


@each([family for family in FAMILIES if family.absorbed])
def test_scaling_after_a_norm_folds_into_its_scale_and_shift_unless_it_is_conditional(family: Family) -> None:
    model, inputs = family.tiny()
    names = list(model.state_dict())
    scale_skips(model, "cs", kappa=0.8, where="after-norm")
    scaled = family.run(model, inputs)
    if family.fuses:
        torch.testing.assert_close(family.run(fuse_skips(model), inputs), scaled, rtol=1e-4, atol=1e-5)
        assert list(model.state_dict()) == names
    else:
        with pytest.raises(ValueError, match="no scale of its own"):
            fuse_skips(model)


@every_family
def test_preserving_keeps_the_function_at_the_start_and_is_undone_exactly(family: Family) -> None:
    model, inputs = family.tiny()
    before = family.run(model, inputs)
    if family.absorbed or not family.fuses:
        with pytest.raises(ValueError, match="cannot be folded"):
            scale_skips(model, "cs", kappa=0.7, preserve=True)
        assert torch.equal(family.run(model, inputs), before)
        return
    scale_skips(model, "cs", kappa=0.7, preserve=True)
    torch.testing.assert_close(family.run(model, inputs), before, rtol=1e-4, atol=1e-5)
    unscale_skips(model)
    assert torch.equal(family.run(model, inputs), before)


@every_family
def test_scaling_after_the_norm_acts_and_can_be_undone(family: Family) -> None:
    model, inputs = family.tiny()
    before = family.run(model, inputs)
    if not family.absorbed and not family.fuses:  # no module reads the skip
        with pytest.raises(ValueError, match="after-norm"):
            scale_skips(model, "uniform", value=0.5, where="after-norm")
        return
    scale_skips(model, "uniform", value=0.5, where="after-norm")
    assert not torch.allclose(family.run(model, inputs), before, rtol=1e-3)
    assert torch.equal(family.run(unscale_skips(model), inputs), before)


# These norms span trunk and skip, so that a constant still acts through the ratio of the two.
SPANNING = {"diffusers-hunyuan-dit", "uvit-skip-norm"}
ABSORBING = [family for family in FAMILIES if family.absorbed and family.name not in SPANNING]


@every_family
def test_a_constant_that_a_norm_absorbs_is_warned_about_once_with_the_measured_share(family: Family) -> None:
    model, _ = family.tiny()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scale_skips(model, "uniform", value=0.9)
    assert len(caught) == (family in ABSORBING)
    for warning in caught:
        assert warning.category is AbsorbedScalingWarning
        assert re.search(r"\d+\.\d% of the scaling survives", str(warning.message))


@pytest.mark.parametrize(("name", "like"), [("diffusers-unet2d", "KeptUpBlock2D"), ("diffusers-k-blocks", "Mine")])
def test_a_block_takes_its_skips_as_the_one_it_derives_from_whatever_its_name(name: str, like: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model, _ = family.tiny()
    for block in model.up_blocks:
        block.__class__ = type(like, (type(block),), {})
    assert [site.width for site in find_skips(model)] == list(family.widths)


@pytest.mark.parametrize("family", NOT_UNETS, ids=str)
def test_a_model_without_long_skips_is_refused_with_advice(family: Family) -> None:
    model, inputs = family.tiny()
    for example_inputs in (None, inputs):
        with pytest.raises(ValueError, match="no long skip connections found in .* Known families: .*sites="):
            find_skips(model, example_inputs)
