"""From a recipe to its network and its diffusion process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..diffusion import DiffusionProcess, build_schedule
from ..models import UViT
from ..models.presets import build_unet
from ..skips import scale_skips
from .config import Config, DiffusionConfig, ModelConfig, ScalingConfig, UNetConfig, UViTConfig
from .recipes import load_recipe, recipe_names


def build_model(config: Config) -> nn.Module:
    """The recipe's network on the CPU, with its skips scaled; the weights are a function of the recipe alone.

    The global random state is left as it was. Recipes that differ in scaling only start from the same network.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return scale(build_network(config.model), config.scaling)


def build_network(config: ModelConfig) -> nn.Module:
    """The network before its skips are scaled, on the current default device."""
    if isinstance(config, UViTConfig):
        return build_uvit(config)
    return build_levels(config)


def build_uvit(config: UViTConfig) -> UViT:
    options = config.model_dump(exclude={"kind", "init_std"})
    return UViT(**options, init_std=config.weight_std)


def build_levels(config: UNetConfig) -> nn.Module:
    """diffusers' UNet2DModel with one level per width."""
    kinds = ["Attn" if side in config.attention else "" for side in config.resolutions]
    return build_unet(
        sample_size=config.sample_size,
        in_channels=config.in_channels,
        out_channels=config.in_channels,
        block_out_channels=config.block_out_channels,
        layers_per_block=config.depth,
        down_block_types=tuple(f"{kind}DownBlock2D" for kind in kinds),
        up_block_types=tuple(f"{kind}UpBlock2D" for kind in reversed(kinds)),
        # The middle attends when any level does.
        add_attention=bool(config.attention),
        attention_head_dim=config.attention_head_dim,
        norm_num_groups=config.norm_num_groups,
        dropout=config.dropout,
    )


def scale(network: nn.Module, config: ScalingConfig) -> nn.Module:
    return scale_skips(network, config.method, where=config.where, **config.options)


def build_process(config: DiffusionConfig) -> DiffusionProcess:
    schedule = build_schedule(config.schedule, time=config.time, num_steps=config.steps)
    return DiffusionProcess(schedule, config.prediction, min_snr_gamma=config.min_snr_gamma)


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@dataclass(frozen=True)
class RecipeSummary:
    """One row of the table of recipes."""

    name: str
    parameters: int
    data: str
    steps: int
    description: str


def summarise(config: Config) -> RecipeSummary:
    """What a recipe trains, on what and for how long; no weight is allocated."""
    with torch.device("meta"):
        network = build_network(config.model)
    parameters = count_parameters(scale(network, config.scaling))
    return RecipeSummary(config.name, parameters, config.data.source, config.training.steps, config.description)


def recipe_summaries() -> list[RecipeSummary]:
    """The rows of all recipes that come with the package."""
    return [summarise(load_recipe(name)) for name in recipe_names()]
