"""The blocks of a recipe whose keys do not depend on each other, and what blocks and networks have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

from ..data.config import TextConfig
from ..diffusion import Prediction, Time
from ..skips import SkipSite
from ..skips.pretrained import read_sites

# Larger numbers have no exact float, and some of hundreds of digits have none at all.
Whole = Annotated[int, Field(ge=1, le=2**53)]
# Sides of images and widths of networks: far more than any is, so that a typo ends in a line, not in hours of waiting.
Size = Annotated[int, Field(ge=1, le=65_536)]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# YAML has lists only; the items stay strict.
Pair = Annotated[tuple[Fraction, Fraction], Strict(False)]
Wholes = Annotated[tuple[Whole, ...], Strict(False)]
Sizes = Annotated[tuple[Size, ...], Strict(False)]

Weights = Literal["ema", "raw"]
"""The EMA weights, or those of the last step."""


class Section(BaseModel):
    """One block of a recipe; an unknown key or a wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class NetworkConfig(Section):
    """What networks of every kind have in common."""

    weights: str | None = None
    """A safetensors file with the weights that training starts from; null = new ones, by the seed."""
    weights_sha256: str | None = None
    """Of that file; noted when a run begins."""
    self_conditioning: bool = False
    """Whether the features of the middle block guide the decoder (`condition_on_self`); U-ViTs and UNets only."""
    parametrization: Literal["standard", "mup"] = "standard"
    """mup = initial values and rates by the kind of each weight, so that a rate found at one width holds at others."""
    base_width: Size | None = None
    """The width at which mup is the same as standard; heads are as large there."""

    @property
    def width(self) -> int | None:
        """Features of a token, or of a pixel at the finest level; None where they are not known."""
        return None

    @property
    def width_ratio(self) -> float:
        """n of μP; 1 in the standard parametrization."""
        return self.width / self.base_width if self.parametrization == "mup" and self.width and self.base_width else 1.0

    def at_width(self, width: int) -> dict[str, Any]:
        """The settings of this network at another width; raises where it cannot be as wide."""
        raise ValueError(f"only the width of a U-ViT or of a UNet can be set, and not that of this network to {width}")

    def mup_checks(self) -> Iterator[tuple[bool, str, str]]:
        """What must hold of a network in μP: whether it does, the key that is wrong if not, and what is wrong."""
        base = self.base_width
        yield base is not None, "base_width", "is missing: the width at which mup is the same as standard"
        try:
            self.at_width(base or 0)
        except ValueError as error:
            yield False, "base_width", str(error)
        other = (
            "a standard network's weights are another function in mup: set parametrization: standard, or base_width: {}"
        )
        yield self.weights is None or base == self.width, "weights", other.format(self.width)

    @property
    def sites(self) -> list[SkipSite] | None:
        """The long skips that the recipe notes; None where they are found in the network itself."""
        return None


class PythonConfig(NetworkConfig):
    """`kind: python`, a network of the user's own: `net(x, t)`, or `net(x, t, condition)` if there is a condition."""

    kind: Literal["python"]
    factory: Annotated[str, Field(pattern=r"^.+:[A-Za-z_][\w.]*$")]
    """What builds it: path/to/net.py:build, beside the recipe, or package.module:build."""
    options: dict[str, Any] = {}
    """The keyword arguments of the factory."""
    image_shape: Annotated[tuple[Whole, Whole, Whole], Strict(False)]
    """(C, H, W) of what the network denoises."""
    skips: Annotated[tuple[dict[str, Any], ...], Strict(False)] | None = None
    """The long skips, outermost first; null = found or traced when a run begins, and kept in its recipe."""
    code_sha256: str | None = None
    """Of the file with the factory; noted when a run begins. The code is part of the run."""

    @property
    def sites(self) -> list[SkipSite] | None:
        try:
            return None if self.skips is None else read_sites(self.skips)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"model.skips cannot be read: {type(error).__name__}: {error}") from error

    @property
    def depth(self) -> Any:
        """What a comparison calls the depth, if the network has such an option."""
        return self.options.get("depth")


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

    width: Size
    """How many numbers the encoder gives for a token."""
    drop: Fraction = 0.0
    """How often the caption is replaced by an empty one, which classifier-free guidance needs."""


class DiffusionConfig(Section):
    """The forward process and what the network predicts."""

    schedule: Literal["linear", "cosine", "sqrt-linear"] = "linear"
    time: Time = "discrete"
    steps: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    prediction: Prediction = "epsilon"
    min_snr_gamma: Positive | None = None
    """null = every time weighs the same."""


class OptimConfig(Section):
    """The optimiser, its learning rate over the steps, clipping and the EMA weights."""

    name: Literal["adamw"] = "adamw"
    lr: Positive
    betas: Pair = (0.9, 0.999)
    eps: Positive = 1e-8
    """What AdamW adds to the root of the squared gradient's average."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.03
    warmup_steps: NotNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up; linear and cosine fall to 0 at the end of `training.steps`."""
    clip_norm: Positive | None = None
    """The largest norm of the gradient; null = never clipped."""
    adaptive_clip: Annotated[float, Field(ge=1)] | None = None
    """The largest norm of each tensor's gradient, over the moving average of its own (AdaGC); null = no such limit.
    `clip_norm` then holds for the first 100 steps only, in which the averages begin."""
    ema_decay: Fraction = 0.9999
    ema_warmup: bool = True
    """Whether update n = 0, 1, … decays by (1 + n)/(10 + n) at most; false = by ema_decay from the first on."""


class EvaluationConfig(Section):
    """How good the samples are while a run trains: what `scalelong evaluate` would find at these steps."""

    every: Whole | None = None
    """Steps between evaluations; the last step is evaluated too. null = never."""
    images: Annotated[int, Field(ge=20, le=100_000_000)] = 1000
    """Sampled as the `sampling:` block says, guidance included. Only equal numbers of images can be compared."""
    network: str = "efficientnet-lite0"
    """The feature network, as for `scalelong evaluate --network`."""
    weights: Literal["ema", "raw", "both"] = "ema"

    @property
    def chosen(self) -> tuple[Weights, ...]:
        return ("ema", "raw") if self.weights == "both" else (self.weights,)
