"""The typed form of a recipe: every key, its type, its default and its limits."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from ..data import DataConfig
from ..data.config import LatentConfig
from ..diffusion.samplers import SAMPLERS, Spacing, Variance
from ..skips import METHODS
from .sections import (
    DiffusionConfig,
    EvaluationConfig,
    Fraction,
    LabelConfig,
    NetworkConfig,
    NotNegative,
    OptimConfig,
    Positive,
    PythonConfig,
    Section,
    Size,
    Sizes,
    TextCondition,
    Whole,
    Wholes,
)


def require(condition: bool, key: str, message: str) -> None:
    """A check that involves several keys; `key` is the one that the error names."""
    if not condition:
        raise PydanticCustomError("conflict", "{message}", {"message": message, "key": key})


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """A check that a text is one of some names, worded as pydantic words it for a Literal."""
    known = list(names)

    def check(name: str) -> str:
        if name not in known:
            expected = ", ".join(map(repr, known))
            raise PydanticCustomError("literal_error", "Input should be one of {expected}", {"expected": expected})
        return name

    return check


class UViTConfig(NetworkConfig):
    """`kind: uvit`, a `scalelong.models.UViT`."""

    kind: Literal["uvit"]
    img_size: Size
    patch_size: Whole
    in_chans: Size = 3
    embed_dim: Size
    depth: Annotated[int, Field(ge=2, le=1024, multiple_of=2)]
    """Blocks on both sides of the middle one; there are depth/2 long skips."""
    num_heads: Whole
    mlp_ratio: Positive = 4.0
    qkv_bias: bool = False
    init_std: Positive | None = None
    """null = 0.02·sqrt(512/embed_dim): small UViTs keep the paper's block gain."""
    qk_norm: bool = False
    """Whether a LayerNorm keeps the queries and keys of each head at unit variance."""
    skip_norm: bool = False
    """Whether a LayerNorm reads trunk and skip where they are joined, as in Hunyuan-DiT."""
    concat_balance: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """EDM2's balance of the join: the skip's share of its magnitude; 0.5 = a plain concatenation."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what the network denoises."""
        return self.in_chans, self.img_size, self.img_size

    @property
    def is_public(self) -> bool:
        """Whether the public U-ViT code can compute it."""
        return not self.qk_norm and not self.skip_norm and self.concat_balance == 0.5

    @property
    def width(self) -> int:
        return self.embed_dim

    @property
    def weight_std(self) -> float:
        """The standard deviation of the linear layers' weights at the start; of a network in μP that at its base."""
        width = self.embed_dim if self.parametrization == "standard" else self.base_width or self.embed_dim
        return 0.02 * math.sqrt(512 / width) if self.init_std is None else self.init_std

    def at_width(self, width: int) -> dict[str, Any]:
        """The settings of this network at another width, its heads as large as they are.

        >>> base = UViTConfig(kind="uvit", img_size=8, patch_size=4, embed_dim=64, depth=2, num_heads=4)
        >>> base.at_width(96)
        {'embed_dim': 96, 'num_heads': 6}
        """
        head = self.embed_dim // self.num_heads
        if width % head:
            raise ValueError(
                f"{width} is no multiple of {head}, the size of a head (embed_dim / num_heads) at every width"
            )
        return {"embed_dim": width, "num_heads": width // head}

    @model_validator(mode="after")
    def _check(self) -> UViTConfig:
        require(self.img_size % self.patch_size == 0, "patch_size", f"must divide img_size ({self.img_size})")
        require(self.embed_dim % self.num_heads == 0, "num_heads", f"must divide embed_dim ({self.embed_dim})")
        for check in self.mup_checks() if self.parametrization == "mup" else ():
            require(*check)
        return self


class UNetConfig(NetworkConfig):
    """`kind: unet`, diffusers' `UNet2DModel`."""

    kind: Literal["unet"]
    sample_size: Size
    in_channels: Size = 3
    block_out_channels: Annotated[Sizes, Field(min_length=1)]
    """The width of each level, the finest first."""
    depth: Annotated[int, Field(ge=1, le=128)]
    """Residual blocks per level (`layers_per_block`); there are levels·(depth + 1) long skips."""
    attention: Wholes = ()
    """The resolutions at which the network attends."""
    attention_head_dim: Whole | None = None
    """null = one head."""
    norm_num_groups: Whole = 32
    norm_eps: Positive = 1e-5
    dropout: Fraction = 0.0
    time_scale_shift: bool = False
    """Whether the time scales and shifts after a norm, as in improved-diffusion, or is added before it."""
    downsample_padding: Literal[0, 1] = 1
    """0 = strided convolutions are padded at the right and bottom only, as in DDPM."""
    flip_sin_to_cos: bool = True
    freq_shift: NotNegative = 0

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what the network denoises."""
        return self.in_channels, self.sample_size, self.sample_size

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The resolution of each level, the finest first."""
        return tuple(self.sample_size >> level for level in range(len(self.block_out_channels)))

    @property
    def width(self) -> int:
        return self.block_out_channels[0]

    def at_width(self, width: int) -> dict[str, Any]:
        """The settings of this network with another width of its finest level, and the others in proportion."""
        widths = [size * width / self.width for size in self.block_out_channels]
        for unit, name in ((self.norm_num_groups, "norm_num_groups"), (self.attention_head_dim, "attention_head_dim")):
            if unit is not None and any(size % unit for size in widths):
                shown = ", ".join(f"{size:g}" for size in widths)
                raise ValueError(f"{width} makes levels of {shown} features, and {name} ({unit}) must divide each")
        return {"block_out_channels": [int(size) for size in widths]}

    @model_validator(mode="after")
    def _check(self) -> UNetConfig:
        halvings = 2 ** (len(self.block_out_channels) - 1)
        require(self.sample_size % halvings == 0, "sample_size", f"must be a multiple of {halvings} for so many levels")
        for width in self.block_out_channels:
            require(width % self.norm_num_groups == 0, "norm_num_groups", f"must divide every width, and not {width}")
        sides = self.resolutions
        for side in self.attention:
            there_are = f"{side} is no resolution of this network; there are {', '.join(map(str, sides))}"
            require(side in sides, "attention", there_are)
        for check in self.mup_checks() if self.parametrization == "mup" else ():
            require(*check)
        one_head = self.parametrization == "mup" and self.attention and self.attention_head_dim is None
        require(not one_head, "attention_head_dim", "is missing: mup needs heads that are as large at every width")
        return self


class TrainingConfig(Section):
    """The loop. Everything counted in steps is counted in optimiser steps."""

    steps: Whole
    batch_size: Whole
    """Images per step over all processes and all micro-batches."""
    grad_accumulation: Whole = 1
    """Micro-batches per step."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto = bf16 where the device has it, else fp32."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What several processes share: ddp = the batch; fsdp = the batch, and the memory of weights and optimiser."""
    compile: bool = False
    channels_last: bool | Literal["auto"] = "auto"
    """The layout of images and kernels; auto = on GPUs."""
    log_every: Whole = 10
    validate_every: Whole | None = 1000
    """null = never, here and for sample_every."""
    sample_every: Whole | None = 1000
    checkpoint_every: Whole = 1000
    keep_last: Whole = 3
    monitor_every: Whole | None = None
    """Steps between readings of the skip monitor, which also go to metrics.jsonl; null = no monitor."""
    max_skipped: Whole = 5
    """Steps in a row with non-finite loss or gradient before the seat belt goes back; without one the run ends."""
    seat_belt: bool = True
    """Whether a run whose loss collapses goes back to where it was healthy, at a lower rate."""
    must_gain: Annotated[float, Field(lt=1)] = 0.5
    """A run that ends with less of what a simple denoiser gains over predicting nothing has failed, for `compare` and
    `edge`; below 0 it may end that much worse than predicting nothing."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Strict(False)] = ()
    """Besides metrics.jsonl, which is always written."""

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        parts, fsdp, monitored = self.grad_accumulation, self.parallel == "fsdp", self.monitor_every is not None
        require(self.batch_size % parts == 0, "batch_size", f"must be a multiple of grad_accumulation ({parts})")
        # Each process would scale its own shards' gradients and find other overflows than the rest.
        sharded_fp16 = fsdp and self.precision == "fp16"
        require(not sharded_fp16, "precision", "parallel: fsdp works with fp32 and bf16, not with fp16")
        # Seen with torch 2.13: the loss is the same, the norm of the gradients is not.
        require(not (fsdp and self.compile), "compile", "parallel: fsdp works without compile only")
        require(not (monitored and self.compile), "monitor_every", "needs compile: false; compiled code calls no hooks")
        return self


class SamplingConfig(Section):
    """How images are sampled from the trained network, for the grids and by `scalelong sample`."""

    sampler: Annotated[str, AfterValidator(one_of(SAMPLERS))] = "ddim"
    steps: Whole = 50
    """Times at which the network is evaluated (twice with Heun's method); all of the schedule's if it has fewer."""
    timestep_spacing: Spacing = "quadratic"
    """Which times: closer together where there is less noise, even (in one of diffusers' ways), or even in log-SNR."""
    variance: Variance = "small"
    """Of what `ddpm` draws: right for data that is one point (small), or standard normal (large). Others draw none."""
    clip: bool | None = None
    """Whether every estimate of x_0 is kept within [-1, 1]; null = that of pixels, not that of latents."""
    guidance: Annotated[float, Field(ge=0)] = 1.0
    """w of ε(∅) + w·(ε(c) − ε(∅)): 1 = the condition as it is, more = stronger. U-ViT's scale s is w = 1 + s."""


def method_options(method: str) -> list[str]:
    """The keys of the `scaling:` block that a method takes, besides `where`."""
    kind = METHODS[method]
    accepted = [] if kind is None else list(inspect.signature(kind).parameters)
    return [name for name in accepted if name in ScalingConfig.model_fields]


class ScalingConfig(Section):
    """What `scale_skips` is given; an option that is null has the method's default."""

    method: Annotated[str, AfterValidator(one_of(METHODS))] = "none"
    where: Literal["input", "after-norm"] = "input"
    kappa: Annotated[float, Field(gt=0, le=1)] | None = None
    value: Positive | None = None
    ratio: Whole | None = None
    activation: Literal["relu", "elu", "mish"] | None = None
    init: float | None = None
    gate: Literal["width", "channels"] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The method's options that the recipe sets."""
        return self.model_dump(include=set(method_options(self.method)), exclude_none=True)

    @model_validator(mode="after")
    def _check(self) -> ScalingConfig:
        accepted = method_options(self.method)
        problem = f"method {self.method!r} has no such option; its options: {', '.join(accepted) or 'none'}"
        for name in type(self).model_fields:
            require(name in {"method", "where", *accepted} or getattr(self, name) is None, name, problem)
        return self


def check_name(name: str) -> str:
    """A name becomes part of those of folders, and must not lead out of them."""
    if name.startswith(".") or re.search(r"[/\\\x00-\x1f\x7f-\x9f]", name):
        raise PydanticCustomError("name", "must not begin with a dot, nor have slashes or control characters in it")
    return name


class Config(Section):
    """A whole recipe."""

    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(check_name)]
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    data: DataConfig
    labels: LabelConfig | None = None
    text: TextCondition | None = None
    latents: LatentConfig | None = None
    model: Annotated[UViTConfig | UNetConfig | PythonConfig, Field(discriminator="kind")]
    diffusion: DiffusionConfig = DiffusionConfig()
    optim: OptimConfig
    training: TrainingConfig
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    scaling: ScalingConfig = ScalingConfig()

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what is denoised: pixels, or latents."""
        if self.latents is None:
            return self.data.channels, self.data.image_size, self.data.image_size
        side = self.data.image_size // self.latents.factor
        return self.latents.channels, side, side

    @property
    def conditional(self) -> bool:
        return self.labels is not None or self.text is not None

    @property
    def sampling_steps(self) -> int:
        return min(self.sampling.steps, self.diffusion.steps)

    @property
    def clips_samples(self) -> bool:
        """Whether estimates of x_0 are kept within the range of pixels."""
        return self.latents is None if self.sampling.clip is None else self.sampling.clip

    @property
    def can_guide(self) -> bool:
        """Whether the network also learns to do without its condition."""
        return any(block is not None and block.drop > 0 for block in (self.labels, self.text))

    @model_validator(mode="after")
    def _check(self) -> Config:
        what = "data" if self.latents is None else "autoencoder"
        plain_unet = isinstance(self.model, UViTConfig) or (isinstance(self.model, UNetConfig) and self.text is None)
        kinds = (
            "parametrization: mup knows the kinds of weight of U-ViTs and of UNets without text, not of this network"
        )
        require(plain_unet or self.model.parametrization == "standard", "model", kinds)
        given, network = ("×".join(map(str, sizes)) for sizes in (self.sample_shape, self.model.image_shape))
        require(given == network, "model", f"denoises C×H×W = {network}, but the {what} gives {given}")
        for key, column in (("labels", "label_column"), ("text", "caption_column")):
            missing = getattr(self, key) is not None and getattr(self.data, column) is None
            require(not missing, key, f"needs data.{column}, the column it is in")
        # Also 0, which is none of the condition: without a drop the network never saw what stands for none.
        plain = self.sampling.guidance == 1.0
        needed = "guidance other than 1 needs labels.drop or text.drop above 0 in training"
        require(self.can_guide or plain, "sampling", needed)
        return self
