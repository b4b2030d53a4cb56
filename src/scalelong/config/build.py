"""From a recipe to its network and its place in memory, its diffusion process and conditioning, and its data."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Batches, BatchOrder, DataError, Examples, Progress
from ..data.dataset import cache_folder, open_images
from ..data.prepare import Job
from ..data.prepared import open_prepared, prepared_folder
from ..diffusion import DiffusionProcess, build_schedule
from ..diffusion.guidance import NOTHING, Condition, Conditioning
from ..models import UViT
from ..models.mup import parametrize
from ..models.presets import build_text_unet, build_unet
from ..skips import AbsorbedScalingWarning, SkipSite, condition_on_self, find_skips, scale_skips
from ..skips.apply import NAME
from ..skips.self_conditioning import NAME as CONDITIONING
from ..utils.atomic import human_size
from ..utils.runtime import machine_memory, training_memory
from .own import build_own, load_start, note_own, read_start, start_digest
from .schema import Config, PythonConfig, TrainingConfig, UNetConfig, UViTConfig
from .sections import DiffusionConfig, NetworkConfig

# The keywords of labels and of text; a network of the user's own takes them after image and time.
CONDITION_NAMES = {"uvit": ("y", "context"), "unet": ("class_labels", "encoder_hidden_states"), "python": None}

# What training keeps for each parameter: weight, gradient, two averages of AdamW, and EMA, in float32.
TRAINED_BYTES, BYTES = 20, 4


def estimate_parameters(config: Config) -> int:
    """About how many numbers the network has, in closed form: too large a one would take hours only to be counted.

    It is exact to some percent for U-ViTs. Of UNets, whose attention is not counted, it is half to nine tenths.
    """
    model, classes = config.model, 0 if config.labels is None else config.labels.embeddings
    text = 0 if config.text is None else config.text.width
    if isinstance(model, UViTConfig):
        width, tokens = model.embed_dim, (model.img_size // model.patch_size) ** 2
        tokens += 0 if config.text is None else config.text.max_length
        blocks = (model.depth + 1) * (4 + 2 * model.mlp_ratio) + model.depth
        return int(blocks * width**2 + (tokens + classes + text + 2 * model.in_chans * model.patch_size**2) * width)
    if isinstance(model, UNetConfig):
        widths, time = model.block_out_channels, 4 * model.block_out_channels[0]
        # Two convolutions of 3×3 pixels in each block, and as wide a skip beside the first of them on the way up.
        down, up = (sum(blocks * 9 * width**2 for width in widths) for blocks in (2 * model.depth, 3 * model.depth + 3))
        steps = sum(time * width for width in widths) * (2 * model.depth + 1)
        return down + up + 36 * widths[-1] ** 2 + steps + time**2 + (classes + text) * time
    return 0


def check_memory(config: Config) -> None:
    """Raise, before the network is built, where this machine has not the memory to train it."""
    count, shape = estimate_parameters(config), config.sample_shape
    images = config.training.batch_size // config.training.grad_accumulation * math.prod(shape) * BYTES
    needed, there = count * TRAINED_BYTES + images, training_memory(config.training.parallel == "fsdp")
    if needed > there:
        what = f"about {count:,} parameters (weights, gradients, AdamW and EMA) and a batch take {human_size(needed)}"
        raise ValueError(
            f"model: {what} to train, and there are {human_size(there)} of memory here: "
            "choose a smaller network or batch, or try it all the same with --force"
        )


def build_model(config: Config, *, fresh: bool = True) -> nn.Module:
    """The recipe's network on the CPU, with its skips scaled; the weights are a function of the recipe alone.

    The global random state is left as it was. Recipes that differ in scaling only start from the same network. Without
    `fresh` the weights that it starts from are not read, because those of a checkpoint follow. Raises, before anything
    is built, where its weights alone are more than the machine's memory.
    """
    needed, there = estimate_parameters(config) * BYTES, machine_memory()
    if needed > there:
        raise ValueError(f"model: its weights take {human_size(needed)}, and this machine has {human_size(there)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = build_network(config)
        if fresh and config.model.weights is not None:
            return start_from(network, config)
        return condition(scale(network, config), config)


def build_network(config: Config) -> nn.Module:
    """The network before its skips are scaled, in its parametrization."""
    network = build_standard(config)
    if config.model.parametrization == "mup":
        parametrize(network, config.model.width_ratio)
    return network


def build_standard(config: Config) -> nn.Module:
    """The network in the standard parametrization; a U-ViT takes label and text as tokens."""
    model = config.model
    if isinstance(model, PythonConfig):
        return build_own(model)
    if isinstance(model, UNetConfig):
        return build_levels(config, model)
    options = model.model_dump(exclude={"kind", "init_std", *NetworkConfig.model_fields})
    if config.labels is not None:
        options["num_classes"] = config.labels.embeddings
    if config.text is not None:
        options |= {"clip_dim": config.text.width, "num_clip_token": config.text.max_length}
    return UViT(**options, init_std=model.weight_std)


def build_levels(config: Config, model: UNetConfig) -> nn.Module:
    """diffusers' UNet with one level per width; labels enter with the time, text by cross-attention."""
    attends = "Attn" if config.text is None else "CrossAttn"
    kinds = [attends if side in model.attention else "" for side in model.resolutions]
    options: dict[str, Any] = {
        "sample_size": model.sample_size,
        "in_channels": model.in_channels,
        "out_channels": model.in_channels,
        "block_out_channels": model.block_out_channels,
        "layers_per_block": model.depth,
        "down_block_types": tuple(f"{kind}DownBlock2D" for kind in kinds),
        "up_block_types": tuple(f"{kind}UpBlock2D" for kind in reversed(kinds)),
        "norm_num_groups": model.norm_num_groups,
        "norm_eps": model.norm_eps,
        "dropout": model.dropout,
        "resnet_time_scale_shift": "scale_shift" if model.time_scale_shift else "default",
        "downsample_padding": model.downsample_padding,
        "flip_sin_to_cos": model.flip_sin_to_cos,
        "freq_shift": model.freq_shift,
        "num_class_embeds": None if config.labels is None else config.labels.embeddings,
    }
    if config.text is not None:
        # This UNet's `attention_head_dim` counts heads.
        heads = tuple(max(1, size // (model.attention_head_dim or size)) for size in model.block_out_channels)
        return build_text_unet(**options, cross_attention_dim=config.text.width, attention_head_dim=heads)
    # The middle attends when any level does. diffusers drops the norm before its attention under scale_shift.
    options |= {"add_attention": bool(model.attention), "attention_head_dim": model.attention_head_dim}
    return build_unet(**options, attn_norm_num_groups=model.norm_num_groups if model.time_scale_shift else None)


def start_from(network: nn.Module, config: Config) -> nn.Module:
    """The network with the weights that the recipe starts from: of a plain one, or one scaled and conditioned alike."""
    weights = read_start(config.model)
    has = {part for name in weights for part in name.split(".")}
    # The weights of what they do not have yet are drawn in the same order as without them.
    steps = [(NAME in has, scale), (CONDITIONING in has, condition)]
    for step in (step for comes_first, step in steps if comes_first):
        step(network, config)
    load_start(network, config.model, weights)
    for step in (step for comes_first, step in steps if not comes_first):
        step(network, config)
    return network


def condition(network: nn.Module, config: Config) -> nn.Module:
    """The network with its decoder guided by its own features, if the recipe says so."""
    return condition_on_self(network) if config.model.self_conditioning else network


def scale(network: nn.Module, config: Config) -> nn.Module:
    """The network with its skips scaled in place; "none" leaves it as it is."""
    scaling = config.scaling
    if scaling.method == "none":
        return network
    return scale_skips(
        network, scaling.method, where=scaling.where, sites=known_sites(network, config), **scaling.options
    )


def known_sites(network: nn.Module, config: Config) -> list[SkipSite] | None:
    """The skips of a network of the user's own, noted or traced; None for others, in which they are found."""
    noted = config.model.sites
    return find_skips(network, example_call(config)) if isinstance(config.model, PythonConfig) and not noted else noted


def example_call(config: Config) -> tuple[Tensor, ...]:
    """Noise, times and conditions as a network is called with them in training. Shape: (2, C, H, W), (2,), …"""
    process, generator = build_process(config.diffusion), torch.Generator().manual_seed(0)
    times = process.model_time(process.stratified_times(2, generator))
    inputs = [torch.randn(2, *config.model.image_shape, generator=generator), times]
    if config.labels is not None:
        inputs.append(torch.zeros(2, dtype=torch.int64))
    if config.text is not None:
        inputs.append(torch.zeros(2, config.text.max_length, config.text.width))
    return tuple(inputs)


def note_start(config: Config, run: Config | None = None) -> Config:
    """The recipe with what training starts from: the files it names by their digests, and the skips of a network of
    the user's own, which are those of `run` if that was begun.
    """
    model, noted = config.model, {}
    if model.weights is not None and model.weights_sha256 is None:
        noted["weights_sha256"] = start_digest(model)
    if isinstance(model, PythonConfig):
        needed = config.scaling.method != "none"
        noted |= note_own(model, None if run is None else run.model, example_call(config), needed=needed)
    return config.model_copy(update={"model": model.model_copy(update=noted)}) if noted else config


def lay_out(network: nn.Module, config: TrainingConfig, device: torch.device | str) -> nn.Module:
    """The network on a device, in the memory layout of its recipe; the same object."""
    device = torch.device(device)
    layout = torch.channels_last if has_channels_last(config, device) else torch.preserve_format
    return network.to(device, memory_format=layout)  # pyright: ignore[reportCallIssue]


def has_channels_last(config: TrainingConfig, device: torch.device) -> bool:
    """Whether a network trains with the channels of a pixel together: by itself on GPUs alone."""
    return device.type == "cuda" if config.channels_last == "auto" else config.channels_last


def build_process(config: DiffusionConfig) -> DiffusionProcess:
    """The forward process and the target of the network."""
    schedule = build_schedule(config.schedule, time=config.time, num_steps=config.steps)
    return DiffusionProcess(schedule, config.prediction, min_snr_gamma=config.min_snr_gamma)


def conditioning_of(config: Config, empty_text: Tensor | None = None) -> Conditioning:
    """The conditioning of a recipe; one with text needs the features of the empty caption to drop its condition."""
    labels, text = config.labels, config.text
    return Conditioning(
        CONDITION_NAMES[config.model.kind],
        takes_labels=labels is not None,
        takes_text=text is not None,
        no_label=labels.classes if labels is not None and labels.drop > 0 else None,
        empty_text=empty_text,
        drop=max((block.drop for block in (labels, text) if block is not None), default=0.0),
    )


def spread_labels(config: Config, count: int, label: int | None = None) -> Condition:
    """Labels for samples: all of one class, or class after class."""
    if config.labels is None:
        return NOTHING
    classes = config.labels.classes
    if label is not None and not 0 <= label < classes:
        raise ValueError(f"there are the classes 0 to {classes - 1}, not {label}")
    labels = torch.arange(count) % classes if label is None else torch.full((count,), label)
    return Condition(labels=labels)


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

    def describe(self) -> str:
        """
        >>> RecipeSummary("digits", 375_898, "sklearn:digits", 3200, "").describe()
        '375,898 parameters, sklearn:digits'
        """
        return f"{self.parameters:,} parameters, {self.data}"


def summarise(config: Config) -> RecipeSummary:
    """What a recipe trains, on what and for how long; no weight is allocated."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = build_network(config)
    with warnings.catch_warnings():
        # That a norm cancels the scaling is said when the recipe is trained.
        warnings.simplefilter("ignore", AbsorbedScalingWarning)
        parameters = count_parameters(condition(scale(network, config), config))
    return RecipeSummary(config.name, parameters, config.data.source, config.training.steps, config.description)


@dataclass(frozen=True)
class Inputs:
    """One process's batches, the examples for validation, and the features of the empty caption. Shape: (L, D)."""

    batches: Batches
    validation: Examples
    empty_text: Tensor | None = None


def open_inputs(
    config: Config,
    *,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Inputs:
    """Open a recipe's data; raises DataError where it is not as the recipe says.

    Where the images must be decoded first, `progress` is told how many are. One process of each machine decodes what
    goes into the image cache; the others wait for it.
    """
    classes = None if config.labels is None else config.labels.classes
    images = None if config.latents is not None else open_images(config.data, classes=classes, progress=progress)
    if images is not None and config.text is None:
        (train, validation), empty_text = images, None
    else:
        job = Job(config.data, config.text, config.latents, prepared_place(config))
        prepared = open_prepared(job, images=images)
        train, validation, empty_text = prepared.train, prepared.validation, prepared.empty_text
        check_width(config, empty_text)
    order = BatchOrder(len(train), config.training.batch_size, config.seed)
    flip = config.data.flip and config.latents is None
    batches = Batches(train, order, flip=flip, rank=rank, world=world, device=device)
    return Inputs(batches, validation, empty_text)


def check_width(config: Config, empty_text: Tensor | None) -> None:
    if config.text is None or empty_text is None:
        return
    encoder, stated, found = config.text.encoder, config.text.width, empty_text.shape[-1]
    if stated != found:
        raise DataError(f"text.width: {encoder!r} gives {found} numbers for a token, not {stated}")


def prepared_place(config: Config) -> Path:
    """The folder that `scalelong prepare` fills for a recipe."""
    if config.text is None and config.latents is None:
        return cache_folder(config.data)
    return prepared_folder(config.name, config.data, config.text, config.latents)
