"""Recipes: YAML files that become a checked `Config`, and the network, process, data and conditions they describe."""

from .build import RecipeSummary, build_model, build_process, summarise
from .load import RecipeError, load_recipe, parse_recipe, recipe_names, to_yaml
from .schema import Config

__all__ = [
    "Config",
    "RecipeError",
    "RecipeSummary",
    "build_model",
    "build_process",
    "load_recipe",
    "parse_recipe",
    "recipe_names",
    "summarise",
    "to_yaml",
]
