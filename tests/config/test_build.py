"""Laws of building: a recipe determines its network, weights included, and scaling is all that scaling changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from scalelong import METHODS, find_skips
from scalelong.config.build import (
    build_model,
    build_process,
    conditioning_of,
    count_parameters,
    has_channels_last,
    lay_out,
    summarise,
)
from scalelong.config.load import load_recipe, recipe_names
from scalelong.config.schema import Config, TrainingConfig
from scalelong.diffusion.guidance import Condition
from scalelong.models import UViT

SMALL = ["model.embed_dim=32", "model.num_heads=2", "model.depth=4"]


def small(*overrides: str) -> Config:
    return load_recipe("digits", [*SMALL, *overrides])


def test_the_same_recipe_builds_the_same_weights_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first = build_model(small("scaling.method=ls"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    second = build_model(small("scaling.method=ls"))
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    other = build_model(small("scaling.method=ls", "seed=1"))
    assert not torch.equal(first.get_parameter("pos_embed"), other.get_parameter("pos_embed"))


@pytest.mark.parametrize("method", METHODS)
def test_recipes_that_differ_in_scaling_only_start_from_the_same_network(method: str) -> None:
    plain = build_model(small("scaling.method=none")).state_dict()
    scaled = build_model(small(f"scaling.method={method}")).state_dict()
    assert all(torch.equal(value, scaled[name]) for name, value in plain.items())
    added = scaled.keys() - plain.keys()
    assert all(name.startswith("skip_scaling.") for name in added)
    assert bool(added) == (method != "none")


def test_the_options_of_the_scaling_block_arrive() -> None:
    coefficients = build_model(small("scaling.kappa=0.5")).get_buffer("skip_scaling.coefficients")
    assert coefficients.tolist() == [1.0, 0.5]
    hidden = build_model(small("scaling.method=ls", "scaling.ratio=2", "scaling.gate=channels"))
    assert hidden.get_parameter("skip_scaling.gates.width32.squeeze.weight").shape == (16, 32)


def test_a_uvit_has_half_as_many_skips_as_its_depth_and_a_unet_one_more_per_level_than_its_depth() -> None:
    uvit = load_recipe("cifar10-tiny-uvit", ["model.depth=6"])
    assert len(find_skips(build_model(uvit))) == 3
    unet = load_recipe("cifar10-tiny-unet", ["model.depth=1", "model.block_out_channels=[8, 16]", "model.attention=[]"])
    assert len(find_skips(build_model(unet))) == 2 * (1 + 1)


def test_a_unet_attends_at_the_resolutions_it_is_told_and_nowhere_else() -> None:
    def attending(attention: str) -> set[str]:
        model = build_model(load_recipe("cifar10-tiny-unet", [f"model.attention={attention}"]))
        modules = [name for name, module in model.named_modules() if type(module).__name__ == "Attention"]
        return {".".join(name.split(".")[:2]) for name in modules}

    assert attending("[]") == set()
    assert attending("[16]") == {"down_blocks.1", "mid_block.attentions", "up_blocks.1"}
    assert attending("[32, 8]") == {
        *("down_blocks.0", "down_blocks.2", "mid_block.attentions", "up_blocks.0", "up_blocks.2"),
    }


@pytest.mark.parametrize("width", [32, 128, 512])
def test_the_weights_of_a_narrow_uvit_keep_the_block_gain_of_the_papers_width(width: int) -> None:
    model = build_model(load_recipe("digits", [f"model.embed_dim={width}", "model.depth=2"]))
    assert isinstance(model, UViT)
    weights = torch.cat([layer.weight.flatten() for layer in model.mid_block.modules() if isinstance(layer, nn.Linear)])
    # std²·width, the gain of a linear layer, is 0.02²·512 at any width; 3 % is six standard errors at width 32.
    assert weights.std().item() * math.sqrt(width) == pytest.approx(0.02 * math.sqrt(512), rel=0.03)


def test_init_std_replaces_the_rule() -> None:
    model = build_model(small("model.init_std=0.001"))
    assert isinstance(model, UViT)
    assert model.mid_block.mlp.fc1.weight.std().item() == pytest.approx(0.001, rel=0.1)


def test_the_model_block_sets_the_norms_and_the_balance_of_a_uvit() -> None:
    block = build_model(small("model.qk_norm=true", "model.skip_norm=true", "model.concat_balance=0.3")).out_blocks[0]
    assert isinstance(block.attn.q_norm, nn.LayerNorm) and isinstance(block.skip_norm, nn.LayerNorm)
    assert block.concat_balance == 0.3


@pytest.mark.parametrize("name", [name for name in recipe_names() if "tiny" in name or name == "digits"])
def test_parameters_counted_without_weights_are_those_of_the_built_model(name: str) -> None:
    config = load_recipe(name, ["scaling.method=ls"])
    assert summarise(config).parameters == count_parameters(build_model(config))


def test_frozen_parameters_are_not_counted() -> None:
    layer = nn.Linear(3, 4)
    layer.bias.requires_grad_(False)
    assert count_parameters(layer) == 12


def test_every_recipe_can_be_summarised() -> None:
    rows = {name: summarise(load_recipe(name)) for name in recipe_names()}
    assert [row.name for row in rows.values()] == recipe_names()
    digits = load_recipe("digits")
    assert (rows["digits"].data, rows["digits"].steps) == ("sklearn:digits", digits.training.steps)
    assert all(row.description for row in rows.values())


def test_the_process_is_the_one_of_the_diffusion_block() -> None:
    overrides = ["schedule=sqrt-linear", "time=continuous", "steps=50", "prediction=x0", "min_snr_gamma=5"]
    process = build_process(small(*(f"diffusion.{override}" for override in overrides)).diffusion)
    assert type(process.schedule).__name__ == "SqrtLinearSchedule"
    assert (process.schedule.time, process.schedule.num_steps) == ("continuous", 50)
    assert (process.prediction, process.min_snr_gamma) == ("x0", 5.0)


SIZE = ("model.block_out_channels=[32, 64]", "model.depth=1", "model.attention=[16]")
COMPILED = {
    "unet": ("cifar10-tiny-unet", *SIZE),
    "text unet": ("flickr-tiny-unet", *SIZE),
    "uvit": ("cifar10-tiny-uvit", "model.embed_dim=64", "model.depth=2"),
}


@pytest.mark.parametrize("recipe", COMPILED)
def test_a_network_is_compiled_in_one_piece(recipe: str) -> None:
    name, *overrides = COMPILED[recipe]
    config = load_recipe(name, overrides)
    network = build_model(config).eval()
    text = config.text
    condition = Condition(text=None if text is None else torch.randn(2, text.max_length, text.width))
    inputs = torch.randn(2, 3, 32, 32), torch.tensor([3, 700])
    torch.compiler.reset()
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    found, expected = (conditioning_of(config).predictor(each, condition)(*inputs) for each in (compiled, network))
    torch.testing.assert_close(found, expected)
    torch.compiler.reset()


# Where networks lie in memory


def layout(channels_last: bool | str = "auto") -> TrainingConfig:
    return TrainingConfig.model_validate({"steps": 1, "batch_size": 1, "channels_last": channels_last})


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [("auto", "cpu", False), ("auto", "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_channels_are_last_on_gpus_unless_the_recipe_says_otherwise(
    setting: bool | str, device: str, expected: bool
) -> None:
    assert has_channels_last(layout(setting), torch.device(device)) is expected


@pytest.mark.parametrize("channels_last", [True, False])
def test_kernels_have_the_layout_of_the_recipe(channels_last: bool) -> None:
    network = nn.Sequential(nn.Conv2d(4, 8, 3))
    assert lay_out(network, layout(channels_last), "cpu") is network
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last) is channels_last


def test_a_network_is_brought_to_the_device() -> None:
    network = lay_out(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Linear(3, 3)), layout(), "meta")
    assert all(parameter.is_meta for parameter in network.parameters())
