"""What the advisor measures of a recipe: its network as training starts, and images, its own or stand-ins for them."""

from __future__ import annotations

import math
import os
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..config import Config, build_model
from ..config.build import conditioning_of, open_inputs, spread_labels
from ..config.schema import ScalingConfig
from ..data.config import DataError
from ..data.sources import DIGITS, local_path
from ..diffusion.guidance import Condition, Predictor
from ..utils.runtime import best_device

# The block gain is measured at so many noised images.
GAIN_IMAGES = 2

# Half a gigabyte of pixels.
MOST_NUMBERS = 2**27

STAND_INS = 512


class Start(NamedTuple):
    """The unscaled network, images of shape (count, C, H, W), how the network is called with their conditions, and why
    the images are stand-ins, if they are."""

    model: nn.Module
    images: Tensor
    predict: Predictor
    stand_in: str = ""


def recipe_start(config: Config, most: int = 10_000) -> Start:
    """The recipe's network and the images of its first batches: at least one, about `most` where they are small.

    Data that is not on this machine is not fetched for it.
    """
    model = build_model(config.model_copy(update={"scaling": ScalingConfig()})).to(best_device())
    images, condition, missing = own_images(config, most) if is_here(config) else stand_ins(config, "not here")
    conditioning = conditioning_of(config)

    def predict(x: Tensor, t: Tensor) -> Tensor:
        return conditioning.predictor(model, repeated(condition, len(x)).to(x.device))(x, t)

    return Start(model, images, predict, missing)


def own_images(config: Config, most: int) -> tuple[Tensor, Condition, str]:
    """The recipe's images, and the conditions of the first of them."""
    try:
        inputs = open_inputs(config)
    except DataError:
        if config.latents is None and config.text is None:
            raise
        return stand_ins(config, "not prepared")
    most = min(most, MOST_NUMBERS // math.prod(config.sample_shape))
    batches = [inputs.batches.at(step) for step in range(max(1, most // config.training.batch_size))]
    conditions = [conditioning_of(config, inputs.empty_text).of(batch) for batch in batches[:GAIN_IMAGES]]
    first = reduce(Condition.followed_by, conditions)[slice(GAIN_IMAGES)]
    return torch.cat([batch.images for batch in batches]), first, ""


def stand_ins(config: Config, why: str) -> tuple[Tensor, Condition, str]:
    """Smooth random pictures, or noise for latents, of the recipe's shape; with classes, or random numbers for text."""
    generator, shape = Generator().manual_seed(config.seed), config.sample_shape
    if config.latents is None:
        coarse = torch.rand(STAND_INS, shape[0], 4, 4, generator=generator) * 2 - 1
        images = nn.functional.interpolate(coarse, shape[1:], mode="bilinear", align_corners=True)
    else:
        images = torch.randn(STAND_INS, *shape, generator=generator)
    labels, text = spread_labels(config, GAIN_IMAGES).labels, None
    if config.text is not None:
        text = torch.randn(GAIN_IMAGES, config.text.max_length, config.text.width, generator=generator)
    said = f"The recipe's data is {why}: these are stand-ins of its shape, so that the band is a rough one"
    return images, Condition(labels, text), f"{said}. Name the data (--set data.source=PATH) or prepare it first."


def is_here(config: Config) -> bool:
    """Whether a recipe's data is on this machine; raises DataError for files that should be and are not."""
    source = config.data.source
    if source == DIGITS or local_path(source) is not None:
        return True
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return (Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")) / source.replace("/", "___")).is_dir()


def repeated(condition: Condition, rows: int) -> Condition:
    """The condition of every row where the rows are the same images over and over."""
    return condition.map(lambda value: value[torch.arange(rows) % len(value)])
