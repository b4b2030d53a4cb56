"""μP: what every weight is, how it begins, how fast it learns; and that nothing differs at the base width."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalelong import scale_skips
from scalelong.config import Config, RecipeError, load_recipe
from scalelong.config.build import build_model
from scalelong.models import UViT
from scalelong.models.mup import RATIO, Multiplier, fold_multiplier, kinds_of, parametrize
from scalelong.models.presets import build_unet
from scalelong.training.parallel import build_optimizer

BASE, WIDTH = 32, 128
RATIO_HERE = WIDTH / BASE
CPU = torch.device("cpu")

CONDITIONED = ("data.label_column=target", "labels={classes: 10, drop: 0.1}")
UNET = (
    "model={kind: unet, sample_size: 8, in_channels: 1, block_out_channels: [32, 64], depth: 1, norm_num_groups: 4, "
    "attention: [4], attention_head_dim: 8, time_scale_shift: true}",
    "scaling.method=ls",
    *CONDITIONED,
)
UVIT = ("model.num_heads=8", "model.qkv_bias=true", "model.qk_norm=true", "model.skip_norm=true", *CONDITIONED)
NETWORKS = {"uvit": UVIT, "uvit at a std": (*UVIT, "model.init_std=0.1"), "unet": UNET}


def recipe(network: str, width: int, *more: str) -> Config:
    """A network at a width, in μP unless `more` says otherwise."""
    overrides = NETWORKS[network]
    sizes = load_recipe("digits", overrides).model.at_width(width)
    kind = ("model.parametrization=mup", f"model.base_width={BASE}", *(f"model.{k}={v}" for k, v in sizes.items()))
    return load_recipe("digits", [*overrides, *kind, *more])


def uvit(width: int, gate: str = "width") -> nn.Module:
    """A U-ViT with everything that it can have, and gates."""
    conditions: dict[str, Any] = {"num_classes": 10, "clip_dim": 12, "num_clip_token": 3, "mlp_time_embed": True}
    options = {"qkv_bias": True, "qk_norm": True, "skip_norm": True}
    network = UViT(8, 4, embed_dim=width, depth=2, num_heads=width // 16, **conditions, **options)
    return scale_skips(network, "ls", gate=gate, ratio=4)


def unet(width: int) -> nn.Module:
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    options = {"layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8, "num_class_embeds": 10}
    return scale_skips(
        build_unet(sample_size=8, block_out_channels=(width, 2 * width), **kinds, **options), "ls", ratio=4
    )


FAMILIES = {"uvit": uvit, "uvit, gates over features": lambda width: uvit(width, "channels"), "unet": unet}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kind_of_a_weight_is_that_of_the_sizes_that_grow_with_the_width(family: str) -> None:
    with torch.random.fork_rng():
        small, large = FAMILIES[family](32), FAMILIES[family](64)
    kinds, sizes = kinds_of(small), [parameter.shape for parameter in large.parameters()]
    grown = [
        sum(a != b for a, b in zip(p.shape, s, strict=True)) for p, s in zip(small.parameters(), sizes, strict=True)
    ]
    output = {"decoder_pred.weight", "conv_out.weight"}
    for (name, parameter), count in zip(small.named_parameters(), grown, strict=True):
        matrix = "hidden" if count == 2 else "output" if name in output else "input" if count else "vector"
        assert kinds[name] == (matrix if parameter.ndim > 1 else "vector"), name
    assert set(kinds.values()) == {"input", "hidden", "output", "vector"}


@pytest.mark.parametrize("network", NETWORKS)
def test_only_hidden_weights_begin_smaller_at_a_larger_width(network: str) -> None:
    base, wide = (build_model(recipe(network, width, "scaling.method=none")) for width in (BASE, WIDTH))
    kinds = kinds_of(base)
    for (name, at_base), here in zip(base.named_parameters(), wide.parameters(), strict=True):
        expected = 1 / math.sqrt(RATIO_HERE) if kinds[name] == "hidden" else 1.0
        if at_base.numel() == 1:
            continue  # One number, drawn for each network, has no spread.
        if at_base.std() > 0:
            # Five standard errors of the logarithm of a ratio of two standard deviations.
            error = 5 * math.sqrt(1 / (2 * at_base.numel()) + 1 / (2 * here.numel()))
            assert abs(math.log(here.std().item() / at_base.std().item() / expected)) < error, name
        else:
            assert torch.equal(at_base.unique(), here.unique()), name


@pytest.mark.parametrize("network", NETWORKS)
def test_hidden_weights_learn_at_a_rate_over_n_and_all_decay_alike(network: str) -> None:
    config = recipe(network, WIDTH)
    model = build_model(config)
    groups, kinds = build_optimizer(model, config.optim, CPU).param_groups, kinds_of(model)
    found = {id(parameter): group for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found) == len(kinds)
    for name, parameter in model.named_parameters():
        group = found[id(parameter)]
        assert group["lr_factor"] == (1 / RATIO_HERE if kinds[name] == "hidden" else 1.0), name
        assert group["lr_factor"] * group["weight_decay"] == config.optim.weight_decay


@pytest.mark.parametrize("network", NETWORKS)
def test_at_the_base_width_it_is_the_standard_network_with_its_optimiser(network: str) -> None:
    config, standard = (recipe(network, BASE, *more) for more in ((), ("model.parametrization=standard",)))
    ours, theirs = build_model(config), build_model(standard)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert not hasattr(ours, RATIO)
    for model in (ours, theirs):
        (group,) = build_optimizer(model, config.optim, CPU).param_groups
        assert [*map(id, group["params"])] == [*map(id, model.parameters())]
        assert (group["lr_factor"], group["weight_decay"]) == (1.0, config.optim.weight_decay)


@pytest.mark.parametrize("network", NETWORKS)
def test_its_parameters_have_the_names_and_shapes_of_the_standard_ones(network: str) -> None:
    ours, theirs = (build_model(recipe(network, WIDTH, *more)) for more in ((), ("model.parametrization=standard",)))
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


def inputs(channels: int = 3) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, channels, 8, 8, generator=generator), torch.tensor([3.0, 700.0])


def small(ratio: float = 2.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = UViT(8, 4, embed_dim=32, depth=2, num_heads=2)
    parametrize(network, ratio)
    return network


def test_the_output_layer_reads_its_input_over_n_and_adds_its_whole_bias() -> None:
    network, seen = small(), {}
    network.norm.register_forward_hook(lambda module, args, output: seen.update(norm=output))
    network.decoder_pred.register_forward_hook(lambda module, args, output: seen.update(pixels=output))
    network(*inputs())
    assert torch.equal(seen["pixels"], nn.functional.linear(seen["norm"] / 2, *network.decoder_pred.parameters()))


def test_a_folded_multiplier_leaves_a_plain_network_that_computes_the_same() -> None:
    network = small()
    expected = network(*inputs())
    fold_multiplier(network)
    plain = UViT(8, 4, embed_dim=32, depth=2, num_heads=2)
    plain.load_state_dict(network.state_dict())
    # 2 is exact in floating point, so that nothing is rounded differently.
    assert torch.equal(network(*inputs()), expected)
    assert torch.equal(plain(*inputs()), expected)
    fold_multiplier(network)
    assert torch.equal(network(*inputs()), expected)


def test_a_copy_keeps_its_multiplier() -> None:
    network = small()
    twin = copy.deepcopy(network)
    assert torch.equal(twin(*inputs()), network(*inputs()))
    (hook,) = twin.decoder_pred._forward_pre_hooks.values()
    assert isinstance(hook, Multiplier) and kinds_of(twin) == kinds_of(network)


def test_the_first_step_of_adam_moves_hidden_weights_by_the_rate_over_n() -> None:
    config = recipe("uvit", WIDTH, "optim.weight_decay=0", "scaling.method=none")
    model = build_model(config)
    optimizer, before = build_optimizer(model, config.optim, CPU), copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * group["lr_factor"]
    model(*inputs(1), torch.tensor([1, 2])).square().mean().backward()
    optimizer.step()
    for name, kind in kinds_of(model).items():
        moved = (model.get_parameter(name) - before[name]).abs().max().item()
        # Adam's first step is the rate, times g / (|g| + ε); some gradients are 0.
        assert moved <= 1e-3 * (1 / RATIO_HERE if kind == "hidden" else 1.0) * 1.001, name
    moved = (model.get_parameter("mid_block.mlp.fc1.weight") - before["mid_block.mlp.fc1.weight"]).abs().max().item()
    assert moved == pytest.approx(1e-3 / RATIO_HERE, rel=1e-3)


REFUSED = {
    "no base": ((), "model.base_width: is missing: the width at which mup is the same as standard"),
    "heads": (("model.base_width=40",), "model.base_width: 40 is no multiple of 16, the size of a head"),
    "weights": (("model.base_width=32", "model.weights=x.safetensors"), "model.weights: a standard network's weights"),
    "groups": (
        (*UNET, "model.base_width=18"),
        "model.base_width: 18 makes levels of 18, 36 features, and norm_num_groups",
    ),
    "head of a unet": (
        (*UNET, "model.base_width=4"),
        "model.base_width: 4 makes levels of 4, 8 features, and attention_",
    ),
    "one head": (
        (*UNET, "model.base_width=32", "model.attention_head_dim=null"),
        "model.attention_head_dim: is missing",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_that_cannot_be_in_mup_is_refused_in_one_line(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(RecipeError) as error:
        load_recipe("digits", [*overrides, "model.parametrization=mup"])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_network_of_ones_own_and_a_unet_with_text_are_refused_with_the_reason() -> None:
    own = "model={kind: python, factory: 'a:b', image_shape: [1, 8, 8], parametrization: mup, base_width: 8}"
    text = ("model.parametrization=mup", "model.base_width=128", "model.attention_head_dim=32")
    for name, overrides in (("digits", [own]), ("coco-unet", text)):
        with pytest.raises(RecipeError, match="mup knows the kinds of weight of U-ViTs and of UNets without text"):
            load_recipe(name, overrides)
