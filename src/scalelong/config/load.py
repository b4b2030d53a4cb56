"""Recipes: YAML files that become a `Config`, with overrides, and with errors that name the line.

`load_recipe("digits", ["scaling.method=ls", "optim.lr=1e-3"])`
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..skips import METHODS
from .errors import KeyPath, config_errors, dotted, unknown_key
from .schema import Config, method_options

# Where each key was set: "recipes/digits.yaml:14" or "override 'optim.lr=1'"; () stands for the recipe itself.
Places = dict[KeyPath, str]

# The scalars of YAML 1.2: 1e-3 is a float, 010 and yes are text. Underscores may group the digits of whole numbers. Of
# several patterns that match, the first decides.
SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
)


class RecipeError(ValueError):
    """A recipe that cannot be used: one line for each problem, each with its place."""


class YamlError(ValueError):
    """Not YAML, or YAML that says one thing twice; `line` is counted from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


class Loader(yaml.SafeLoader):
    """Reads the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}


class Dumper(yaml.SafeDumper):
    """Quotes whatever a reader of either YAML, 1.1 or 1.2, would take for something other than text."""


for _tag, _pattern, _first in SCALARS:
    for _side in (Loader, Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


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

    An override of scaling.method drops those of the file's options that the new method does not have.
    """
    try:
        raw, lines = yaml_with_lines(text)
    except YamlError as error:
        raise RecipeError(f"{file}:{error.line}: {error}") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{file}:1: a recipe is a list of 'key: value' lines, got {raw!r}")
    places = {(): file, **{key: f"{file}:{line}" for key, line in lines.items()}}
    for override in overrides:
        apply_override(override, raw, places)
    drop_options_of_replaced_method(raw, places)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise RecipeError("\n".join(config_errors(error, raw, places))) from error


def to_yaml(config: Config) -> str:
    """The resolved recipe, with every default written out; `parse_recipe` reads it back to an equal one."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


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


def apply_override(override: str, raw: dict[str, Any], places: Places) -> None:
    """Put the override's value in its place, and note that it came from there."""
    place = f"override {override!r}"
    name, equals, text = override.partition("=")
    key: KeyPath = tuple(name.strip().split("."))
    if not equals or not all(key):
        raise RecipeError(f"{place}: write it as section.key=value, for instance optim.lr=1e-3")
    try:
        value, _ = yaml_with_lines(text)
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


def drop_options_of_replaced_method(raw: dict[str, Any], places: Places) -> None:
    """Drop what the file sets for its own method, where an override names another one."""

    def overridden(option: str) -> bool:
        return places.get(("scaling", option), "").startswith("override ")

    scaling = raw.get("scaling")
    if not isinstance(scaling, dict) or scaling.get("method") not in METHODS or not overridden("method"):
        return
    options = {option for method in METHODS for option in method_options(method)}
    for name in options - set(method_options(scaling["method"])):
        if not overridden(name):
            scaling.pop(name, None)


def yaml_with_lines(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """A document, and the line on which each of its keys and items stands, counted from 1.

    >>> yaml_with_lines("optim:\\n  lr: 1e-3\\n")
    ({'optim': {'lr': 0.001}}, {('optim',): 1, ('optim', 'lr'): 2})
    """
    lines: dict[KeyPath, int] = {}
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return None if node is None else _construct(loader, node, (), lines), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(mark.line + 1 if mark else 1, error.problem or "is not YAML") from error
    except yaml.reader.ReaderError as error:
        raise YamlError(text.count("\n", 0, error.position) + 1, f"is not text: {error.reason}") from error


def _construct(loader: Loader, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[(*path, number)] = item.start_mark.line + 1
        return [_construct(loader, item, (*path, number), lines) for number, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    mapping = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise YamlError(line, "a key must be text")
        if key in mapping:
            raise YamlError(line, f"{dotted((*path, key))} is already set on line {lines[(*path, key)]}")
        lines[(*path, key)] = line
        mapping[key] = _construct(loader, value, (*path, key), lines)
    return mapping
