"""Laws of the preset table: every row is exactly the network it says."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn

from scalelong.models import UViT, example_inputs, preset, preset_names
from scalelong.models.presets import PRESETS, find_preset

PUBLISHED = {
    "cifar10-uvit-s2": (44_255_328, 6),
    "celeba64-uvit-s4": (44_292_228, 6),
    "imagenet64-uvit-m4": (130_940_292, 8),
    "imagenet64-uvit-l4": (286_827_652, 10),
    "coco-uvit-s2": (44_692_644, 6),
    "coco-uvit-s2-deep": (58_345_636, 8),
    "cifar10-unet": (35_746_307, 12),
    "celeba64-unet": (78_700_803, 15),
    "improved-cifar10-unet": (52_546_438, 16),
    "improved-imagenet64-unet": (273_049_350, 16),
}
NARROW_UVIT = {"embed_dim": 32, "num_heads": 4}
# Groups and heads of the full rows do not divide 32 channels.
NARROW_UNET = {"layers_per_block": 1, "attention_head_dim": 32, "norm_num_groups": 8, "attn_norm_num_groups": 8}

every_preset = pytest.mark.parametrize("name", PUBLISHED)


def count_skips(model: nn.Module) -> int:
    if isinstance(model, UViT):
        return len(model.out_blocks)
    up_blocks: Any = model.up_blocks
    return sum(len(block.resnets) for block in up_blocks)


def narrow(name: str) -> nn.Module:
    """The preset's layout with few channels, so that a forward pass takes milliseconds."""
    if "uvit" in name:
        return preset(name, **NARROW_UVIT)
    channels = [32] * len(find_preset(name).builder.keywords["block_out_channels"])
    return preset(name, block_out_channels=channels, **NARROW_UNET)


def test_the_table_holds_every_setting_once() -> None:
    assert preset_names() == [row.name for row in PRESETS] == list(PUBLISHED)


@every_preset
def test_a_preset_has_exactly_the_published_parameters_and_skips(name: str) -> None:
    with torch.device("meta"):
        model = preset(name)
    built = (sum(parameter.numel() for parameter in model.parameters()), count_skips(model))
    row = find_preset(name)
    assert built == (row.parameters, row.num_skips) == PUBLISHED[name]


@every_preset
@torch.no_grad()
def test_example_inputs_fit_the_forward_of_their_preset(name: str) -> None:
    inputs = example_inputs(name, batch=2)
    output = narrow(name).eval()(**inputs)
    image = inputs["x"] if "x" in inputs else inputs["sample"]
    channels = 6 if name.startswith("improved") else image.shape[1]
    result = output if isinstance(output, torch.Tensor) else output.sample
    assert result.shape == (2, channels, *image.shape[2:])


@every_preset
def test_example_inputs_have_the_size_and_conditions_of_the_setting(name: str) -> None:
    inputs = example_inputs(find_preset(name), batch=3)
    image = inputs["x"] if "x" in inputs else inputs["sample"]
    expected = (3, 4, 32, 32) if "coco" in name else (3, 3, 64, 64) if "64" in name else (3, 3, 32, 32)
    assert image.shape == expected
    assert ("y" in inputs or "class_labels" in inputs) == ("imagenet" in name)
    assert ("context" in inputs) == ("coco" in name)


def test_example_inputs_are_fixed_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = example_inputs("coco-uvit-s2"), example_inputs("coco-uvit-s2")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_overrides_reach_the_constructor() -> None:
    model = preset("cifar10-uvit-s2", depth=4, **NARROW_UVIT)
    assert (count_skips(model), model.embed_dim, model.num_patches) == (2, 32, 256)
    with pytest.raises(TypeError, match="colour"):
        preset("cifar10-uvit-s2", colour=3)


@pytest.mark.parametrize(
    ("wrong", "closest"), [("cifar10_uvit_s2", "cifar10-uvit-s2"), ("celeba-unet", "celeba64-unet")]
)
def test_an_unknown_name_suggests_the_closest_and_lists_all(wrong: str, closest: str) -> None:
    with pytest.raises(ValueError, match=f"unknown preset '{wrong}': did you mean '{closest}'.*coco-uvit-s2-deep"):
        preset(wrong)


@pytest.mark.parametrize("field", ["parameters", "builder"])
def test_rows_cannot_be_changed(field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(find_preset("cifar10-unet"), field, None)


def test_a_unet_without_diffusers_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.models.unets.unet_2d", None)
    with pytest.raises(ImportError, match=r'pip install "scalelong\[train\]"'):
        preset("cifar10-unet")
