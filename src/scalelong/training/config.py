"""The typed form of a recipe: every key, its type, its default and its limits.

All classes are frozen, and an unknown key or a wrong type is an error; `recipes.py` gives it the file's line.
"""

from __future__ import annotations

import inspect
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from ..data import DataConfig
from ..diffusion import Prediction, Time
from ..skips import METHODS

Whole = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# YAML has lists only; the items stay strict.
Pair = Annotated[tuple[Fraction, Fraction], Strict(False)]
Wholes = Annotated[tuple[Whole, ...], Strict(False)]


def require(condition: bool, key: str, message: str) -> None:
    """A check that involves several keys; `key` is the one the message is put down to."""
    if not condition:
        raise PydanticCustomError("conflict", "{message}", {"message": message, "key": key})


def shape(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))


class Section(BaseModel):
    """One block of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class UViTConfig(Section):
    """`kind: uvit`, a `scalelong.models.UViT`."""

    kind: Literal["uvit"]
    img_size: Whole
    patch_size: Whole
    in_chans: Whole = 3
    embed_dim: Whole
    depth: Annotated[int, Field(ge=2, multiple_of=2)]
    """Blocks on both sides of the middle one; there are depth/2 long skips."""
    num_heads: Whole
    mlp_ratio: Positive = 4.0
    qkv_bias: bool = False
    init_std: Positive | None = None
    """null = 0.02·sqrt(512/embed_dim): small UViTs keep the paper's block gain."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what the network denoises."""
        return self.in_chans, self.img_size, self.img_size

    @property
    def weight_std(self) -> float:
        """The standard deviation of the linear layers' weights at the start."""
        return 0.02 * math.sqrt(512 / self.embed_dim) if self.init_std is None else self.init_std

    @model_validator(mode="after")
    def _check(self) -> UViTConfig:
        require(self.img_size % self.patch_size == 0, "patch_size", f"must divide img_size ({self.img_size})")
        require(self.embed_dim % self.num_heads == 0, "num_heads", f"must divide embed_dim ({self.embed_dim})")
        return self


class UNetConfig(Section):
    """`kind: unet`, diffusers' `UNet2DModel`."""

    kind: Literal["unet"]
    sample_size: Whole
    in_channels: Whole = 3
    block_out_channels: Annotated[Wholes, Field(min_length=1)]
    """The width of each level, the finest first."""
    depth: Whole
    """Residual blocks per level (`layers_per_block`); there are levels·(depth + 1) long skips."""
    attention: Wholes = ()
    """The resolutions at which the network attends."""
    attention_head_dim: Whole | None = None
    """null = one head."""
    norm_num_groups: Whole = 32
    dropout: Fraction = 0.0

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what the network denoises."""
        return self.in_channels, self.sample_size, self.sample_size

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The resolution of each level, the finest first."""
        return tuple(self.sample_size >> level for level in range(len(self.block_out_channels)))

    @model_validator(mode="after")
    def _check(self) -> UNetConfig:
        halvings = 2 ** (len(self.block_out_channels) - 1)
        require(self.sample_size % halvings == 0, "sample_size", f"must be a multiple of {halvings} for so many levels")
        for width in self.block_out_channels:
            require(width % self.norm_num_groups == 0, "norm_num_groups", f"must divide every width, and not {width}")
        for side in self.attention:
            known = ", ".join(map(str, self.resolutions))
            require(
                side in self.resolutions, "attention", f"{side} is no resolution of this network; there are {known}"
            )
        return self


ModelConfig = Annotated[UViTConfig | UNetConfig, Field(discriminator="kind")]


class DiffusionConfig(Section):
    """The forward process and what the network predicts."""

    schedule: Literal["linear", "cosine", "sqrt-linear"] = "linear"
    time: Time = "discrete"
    steps: Whole = 1000
    prediction: Prediction = "epsilon"
    min_snr_gamma: Positive | None = None
    """null = every time weighs the same."""


class OptimConfig(Section):
    """The optimiser, its warm-up and the averaged weights."""

    name: Literal["adamw"] = "adamw"
    lr: Positive
    betas: Pair = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 0.03
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    clip_norm: Positive | None = None
    """The largest norm of the gradient; null = never clipped."""
    ema_decay: Fraction = 0.9999


class TrainingConfig(Section):
    """The loop. Everything counted in steps is counted in optimiser steps."""

    steps: Whole
    batch_size: Whole
    """Images per step over all processes and all accumulated parts."""
    grad_accumulation: Whole = 1
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto = bf16 where the device has it, else fp32."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What several processes share: ddp = the batch; fsdp = the batch, and the memory of weights and optimiser."""
    compile: bool = False
    channels_last: bool = False
    log_every: Whole = 10
    eval_every: Whole | None = 1000
    """null = never, here and for sample_every."""
    sample_every: Whole | None = 1000
    checkpoint_every: Whole = 1000
    keep_last: Whole = 3
    max_skipped: Whole = 5
    """Steps in a row with non-finite loss or gradient before the run goes back to the last good checkpoint."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Strict(False)] = ()
    """Besides metrics.jsonl, which is always written."""

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        parts = self.grad_accumulation
        require(self.batch_size % parts == 0, "batch_size", f"must be a multiple of grad_accumulation ({parts})")
        # Each process would scale its own shards' gradients and find other overflows than the rest.
        sharded_fp16 = self.parallel == "fsdp" and self.precision == "fp16"
        require(not sharded_fp16, "precision", "parallel: fsdp works with fp32 and bf16, not with fp16")
        return self


def method_options(method: str) -> list[str]:
    """The keys of the `scaling:` block that a method takes, besides `where`."""
    kind = METHODS[method]
    accepted = [] if kind is None else list(inspect.signature(kind).parameters)
    return [name for name in accepted if name in ScalingConfig.model_fields]


def _known_method(method: str) -> str:
    if method not in METHODS:
        expected = ", ".join(map(repr, METHODS))
        raise PydanticCustomError("literal_error", "Input should be one of {expected}", {"expected": expected})
    return method


class ScalingConfig(Section):
    """What `scale_skips` is given; an option that is null has the method's default."""

    method: Annotated[str, AfterValidator(_known_method)] = "none"
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
        values = {name: getattr(self, name) for name in method_options(self.method)}
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _check(self) -> ScalingConfig:
        accepted = method_options(self.method)
        foreign = [name for name in type(self).model_fields if name not in {"method", "where", *accepted}]
        for name in foreign:
            own = ", ".join(accepted) or "none"
            require(getattr(self, name) is None, name, f"method {self.method!r} has no such option; its options: {own}")
        return self


class Config(Section):
    """A whole recipe."""

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    data: DataConfig
    model: ModelConfig
    diffusion: DiffusionConfig = DiffusionConfig()
    optim: OptimConfig
    training: TrainingConfig
    scaling: ScalingConfig = ScalingConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        images, network = self.data.image_shape, self.model.image_shape
        require(images == network, "model", f"denoises C×H×W = {shape(network)}, but the data gives {shape(images)}")
        return self
