"""The κ advice for the recipe that is compared, beside its results."""

from __future__ import annotations

from pathlib import Path

from ..files import Files, to_json, write_whole
from ..stability import suggest_kappa
from ..stability.recipe import recipe_start
from ..training import Config

FILE = "kappa.json"


def write_advice(config: Config, path: Path) -> None:
    """Measure the recipe's unscaled network on what it would train on, and write what was recommended."""
    start, prediction = recipe_start(config), config.diffusion.prediction
    advice = suggest_kappa(start.model, start.images, start.schedule, prediction=prediction, predict=start.predict)
    content = to_json(advice.summary())
    write_whole(path, lambda temporary: Files().write_bytes(temporary, content))
