"""The κ advice for the recipe that is compared, beside its results."""

from __future__ import annotations

from pathlib import Path

from ..config import Config
from ..kappa.recipe import advise_recipe
from ..utils.atomic import Files, atomic_write, to_json

FILE = "kappa.json"


def write_advice(config: Config, path: Path) -> None:
    """Measure the recipe's unscaled network on what it would train on, and write what was recommended."""
    content = to_json(advise_recipe(config).summary())
    atomic_write(path, lambda temporary: Files().write_bytes(temporary, content))
