"""The κ advice for the recipe that is compared, beside its results."""

from __future__ import annotations

from pathlib import Path

from ..files import Files, to_json, write_whole
from ..recipes import Config
from ..stability.recipe import advise_recipe

FILE = "kappa.json"


def write_advice(config: Config, path: Path) -> None:
    """Measure the recipe's unscaled network on what it would train on, and write what was recommended."""
    content = to_json(advise_recipe(config).summary())
    write_whole(path, lambda temporary: Files().write_bytes(temporary, content))
