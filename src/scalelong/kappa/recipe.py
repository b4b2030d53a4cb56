"""A recipe's network as it starts, the images it would see, and the κ advice for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from ..config import Config, build_model, build_process
from ..config.build import conditioning_of, open_inputs
from ..config.schema import ScalingConfig
from ..diffusion import Schedule
from ..diffusion.guidance import Condition
from ..diffusion.samplers import Predictor
from ..utils.process import best_device
from .advisor import GAIN_IMAGES, KappaAdvice, suggest_kappa

# Half a gigabyte of pixels.
MOST_NUMBERS = 2**27


@dataclass(frozen=True)
class RecipeStart:
    """The unscaled network, images as it takes them (count, C, H, W), and how it is called with their conditions."""

    model: nn.Module
    images: Tensor
    schedule: Schedule
    predict: Predictor


def recipe_start(config: Config, most: int = 10_000) -> RecipeStart:
    """Build the recipe's network and read its first batches: at least one, about `most` images where they are small."""
    model = build_model(config.model_copy(update={"scaling": ScalingConfig()})).to(best_device())
    inputs = open_inputs(config)
    most = min(most, MOST_NUMBERS // math.prod(config.sample_shape))
    batches = [inputs.batches.at(step) for step in range(max(1, most // config.training.batch_size))]
    conditioning = conditioning_of(config, inputs.empty_text)
    conditions = [conditioning.of(batch) for batch in batches[:GAIN_IMAGES]]
    first = reduce(Condition.followed_by, conditions)[slice(GAIN_IMAGES)]

    def predict(x: Tensor, t: Tensor) -> Tensor:
        return conditioning.predictor(model, repeated(first, len(x)).to(x.device))(x, t)

    images = torch.cat([batch.images for batch in batches])
    return RecipeStart(model, images, build_process(config.diffusion).schedule, predict)


def advise_recipe(config: Config) -> KappaAdvice:
    """Measure the recipe's network as it starts, without scaling, on what it would train on."""
    start, prediction = recipe_start(config), config.diffusion.prediction
    return suggest_kappa(start.model, start.images, start.schedule, prediction=prediction, predict=start.predict)


def repeated(condition: Condition, rows: int) -> Condition:
    """The condition of every row where the rows are the same images over and over."""
    return condition.map(lambda value: value[torch.arange(rows) % len(value)])
