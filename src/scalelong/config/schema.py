"""The typed form of a recipe: every key, its type, its default and its limits.

All classes are frozen, and an unknown key or a wrong type is an error; `recipes.py` gives it the file's line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from ..data import DataConfig
from ..data.config import LatentConfig, TextConfig
from ..diffusion import Prediction, Time
from ..diffusion.samplers import SAMPLERS
from ..skips import METHODS
from .model_schema import ModelConfig, UNetConfig, UViTConfig
from .sections import Fraction, Pair, Positive, Section, Whole, require, shape

__all__ = [
    "Config",
    "DiffusionConfig",
    "EvaluationConfig",
    "LabelConfig",
    "ModelConfig",
    "OptimConfig",
    "SamplingConfig",
    "ScalingConfig",
    "TextCondition",
    "TrainingConfig",
    "UNetConfig",
    "UViTConfig",
    "Weights",
    "method_options",
]


Weights = Literal["ema", "raw"]
"""The EMA weights, or those of the last step."""


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """A check that a text is one of some names, worded as pydantic words it for a Literal."""
    known = list(names)

    def check(name: str) -> str:
        if name not in known:
            expected = ", ".join(map(repr, known))
            raise PydanticCustomError("literal_error", "Input should be one of {expected}", {"expected": expected})
        return name

    return check


class LabelConfig(Section):
    """The `labels:` block: the network is told the class of the image."""

    classes: Whole
    """Labels go from 0 to classes − 1."""
    drop: Fraction = 0.0
    """How often the label is replaced by one that stands for no class, which classifier-free guidance needs."""

    @property
    def embeddings(self) -> int:
        """Rows of the network's table of labels; the last stands for no class, if there is one."""
        return self.classes + (self.drop > 0)


class TextCondition(TextConfig):
    """The `text:` block: the network is told the features of a caption."""

    width: Whole
    """How many numbers the encoder gives for a token."""
    drop: Fraction = 0.0
    """How often the caption is replaced by an empty one, which classifier-free guidance needs."""


class DiffusionConfig(Section):
    """The forward process and what the network predicts."""

    schedule: Literal["linear", "cosine", "sqrt-linear"] = "linear"
    time: Time = "discrete"
    steps: Whole = 1000
    prediction: Prediction = "epsilon"
    min_snr_gamma: Positive | None = None
    """null = every time weighs the same."""


class OptimConfig(Section):
    """The optimiser, its warm-up and the EMA weights."""

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
        # Seen with torch 2.13: the loss is the same, the norm of the gradients is not.
        require(not (self.parallel == "fsdp" and self.compile), "compile", "parallel: fsdp works without compile only")
        watched = self.monitor_every is not None
        require(not (watched and self.compile), "monitor_every", "needs compile: false; compiled code calls no hooks")
        return self


class SamplingConfig(Section):
    """How images are drawn from the trained network, for the grids and by `scalelong sample`."""

    sampler: Annotated[str, AfterValidator(one_of(SAMPLERS))] = "ddim"
    steps: Whole = 50
    guidance: Annotated[float, Field(ge=0)] = 1.0
    """w of ε(∅) + w·(ε(c) − ε(∅)): 1 = the condition as it is, more = stronger. U-ViT's scale s is w = 1 + s."""


class EvaluationConfig(Section):
    """How good drawn images are while a run trains: what `scalelong evaluate` would find at these steps."""

    every: Whole | None = None
    """Steps between evaluations; the last step is evaluated too. null = never."""
    images: Annotated[int, Field(ge=20)] = 1000
    """Drawn as the `sampling:` block says, guidance included. Only equal numbers of images can be compared."""
    network: str = "efficientnet-lite0"
    """The feature network, as for `scalelong evaluate --network`."""
    weights: Literal["ema", "raw", "both"] = "ema"

    @property
    def chosen(self) -> tuple[Weights, ...]:
        """One after the other."""
        return ("ema", "raw") if self.weights == "both" else (self.weights,)


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
    labels: LabelConfig | None = None
    text: TextCondition | None = None
    latents: LatentConfig | None = None
    model: ModelConfig
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
            return self.data.image_shape
        side = self.data.image_size // self.latents.factor
        return self.latents.channels, side, side

    @property
    def conditional(self) -> bool:
        return self.labels is not None or self.text is not None

    @property
    def can_guide(self) -> bool:
        """Whether the network also learns to do without its condition."""
        return any(block is not None and block.drop > 0 for block in (self.labels, self.text))

    @model_validator(mode="after")
    def _check(self) -> Config:
        given, network = self.sample_shape, self.model.image_shape
        what = "data" if self.latents is None else "autoencoder"
        require(given == network, "model", f"denoises C×H×W = {shape(network)}, but the {what} gives {shape(given)}")
        for key, block, column in (
            ("labels", self.labels, self.data.label_column),
            ("text", self.text, self.data.caption_column),
        ):
            name = {"labels": "label_column", "text": "caption_column"}[key]
            require(block is None or column is not None, key, f"needs data.{name}, the column it is in")
        # Also 0, which is none of the condition: without a drop the network never saw what stands for none.
        plain = self.sampling.guidance == 1.0
        require(
            self.can_guide or plain,
            "sampling",
            "guidance other than 1 needs labels.drop or text.drop above 0 in training",
        )
        return self
