"""Recipes: YAML files that become a `Config`, with overrides, and with errors that name the line.

`load_recipe("digits", ["scaling.method=ls", "optim.lr=1e-3"])`
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..skips import METHODS
from .errors import config_errors, dotted, unknown_key
from .schema import Config, method_options
from .yaml_with_lines import KeyPath, YamlError, read_yaml, write_yaml

# Where each key was set: "recipes/digits.yaml:14" or "override 'optim.lr=1'"; () stands for the recipe itself.
Places = dict[KeyPath, str]


class RecipeError(ValueError):
    """A recipe that cannot be used: one line for each problem, each with its place."""


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A recipe that comes with the package, by name, or any recipe file, by path; overrides are `section.key=value`.

    >>> load_recipe("digits", ["scaling.kappa=0.5"]).scaling.kappa
    0.5
    """
    path = find_recipe(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text in UTF-8"
        raise RecipeError(f"{display(path)}: {reason or error}") from error
    return parse_recipe(text, overrides, file=display(path))


def parse_recipe(text: str, overrides: Sequence[str] = (), *, file: str = "recipe") -> Config:
    """A recipe from its text; `file` is what errors call it.

    An override of scaling.method leaves behind those of the file's options that the new method does not have.
    """
    raw, places = _read(text, file)
    for override in overrides:
        _apply(override, raw, places)
    _drop_options_of_replaced_method(raw, places)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise RecipeError("\n".join(config_errors(error, raw, places))) from error


def to_yaml(config: Config) -> str:
    """The resolved recipe, with every default written out; `parse_recipe` reads it back to an equal one."""
    return write_yaml(config.model_dump(mode="json"))


def recipe_names() -> list[str]:
    """The recipes that come with the package, in alphabetical order."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def recipe_folder() -> Path:
    """Where they are: inside the installed package, or beside `src` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "recipes"
    return packaged if packaged.is_dir() else package.parents[1] / "recipes"


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe; text without a folder and without .yaml is a name."""
    given = Path(name_or_path)
    if isinstance(name_or_path, Path) or given.suffix in {".yaml", ".yml"} or given.parent != Path():
        path = given.expanduser()
        if not path.is_file():
            raise RecipeError(f"there is no recipe file {str(name_or_path)!r} (looked for {path.absolute()})")
        return path
    names = recipe_names()
    if name_or_path not in names:
        close = difflib.get_close_matches(name_or_path, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise RecipeError(
            f"there is no recipe {name_or_path!r}; {hint}Recipes: {', '.join(names)}, or the path of a .yaml file"
        )
    return recipe_folder() / f"{name_or_path}.yaml"


def display(path: Path) -> str:
    """The path from the working directory, if it lies in it, as one would type it."""
    resolved = path.resolve()
    return os.path.relpath(resolved) if resolved.is_relative_to(Path.cwd()) else str(path)


def _read(text: str, file: str) -> tuple[dict[str, Any], Places]:
    try:
        raw, lines = read_yaml(text)
    except YamlError as error:
        raise RecipeError(f"{file}:{error.line}: {error}") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{file}:1: a recipe is a list of 'key: value' lines, got {raw!r}")
    return raw, {(): file, **{key: f"{file}:{line}" for key, line in lines.items()}}


def _apply(override: str, raw: dict[str, Any], places: Places) -> None:
    """Put the override's value in its place, and note that it came from there."""
    place = f"override {override!r}"
    name, equals, text = override.partition("=")
    key: KeyPath = tuple(name.strip().split("."))
    if not equals or not all(key):
        raise RecipeError(f"{place}: write it as section.key=value, for instance optim.lr=1e-3")
    try:
        value = read_yaml(text).value
    except YamlError as error:
        raise RecipeError(f"{place}: {error}") from error
    section: Any = raw
    for depth, part in enumerate(key[:-1], start=1):
        if section.get(part) is None:  # A resolved recipe says `labels: null` where another leaves them out.
            section[part], places[key[:depth]] = {}, place
        section = section[part]
        if not isinstance(section, dict):
            raise RecipeError(f"{place}: {dotted(key)}: {unknown_key(key, raw)}")
    section[key[-1]] = value
    for below in [known for known in places if known[: len(key)] == key]:
        del places[below]
    places[key] = place


def _drop_options_of_replaced_method(raw: dict[str, Any], places: Places) -> None:
    scaling = raw.get("scaling")
    if not isinstance(scaling, dict) or scaling.get("method") not in METHODS or not _overridden("method", places):
        return
    kept = {"method", "where", *method_options(scaling["method"])}
    options = {option for method in METHODS for option in method_options(method)}
    for name in [name for name in scaling if name in options - kept and not _overridden(name, places)]:
        del scaling[name]


def _overridden(option: str, places: Places) -> bool:
    return places.get(("scaling", option), "").startswith("override ")
