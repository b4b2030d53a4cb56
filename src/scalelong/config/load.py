"""Recipes: YAML files that become a `Config`, with overrides, and with errors that name line, key and closest key."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..skips import METHODS
from .own import anchored, anchored_factory
from .schema import Config, ScalingConfig, method_options

KeyPath = tuple[str | int, ...]

# Where each key was set: "recipes/digits.yaml:14" or "override 'optim.lr=1'"; () stands for the recipe itself.
Places = dict[KeyPath, str]

# Of names that are less alike, one is not suggested for the other.
SIMILAR = 0.6

# A recipe has about 100 lines and 3 levels. More is refused before it is built: a few lines of aliases stand for
# billions of keys, and thousands of levels are more than Python can follow.
LARGEST_FILE, MOST_KEYS, DEEPEST = 1 << 20, 10_000, 20
TOO_DEEP = f"is nested deeper than {DEEPEST} levels, which no recipe is"

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
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=TOO_DEEP, problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class Dumper(yaml.SafeDumper):
    """Quotes whatever a reader of either YAML, 1.1 or 1.2, would take for something other than text."""

    def analyze_scalar(self, scalar: str) -> Any:
        found = super().analyze_scalar(scalar)
        if "\x85" in scalar:  # A break between lines to YAML 1.1, which keeps it as an escape only.
            found.allow_flow_plain = found.allow_block_plain = found.allow_single_quoted = False
        return found


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
        raise RecipeError(f"{display(path)}: {reason}") from error
    return parse_recipe(text, overrides, file=display(path), folder=path.parent)


def parse_recipe(text: str, overrides: Sequence[str] = (), *, file: str = "recipe", folder: Path = Path()) -> Config:
    """A recipe from its text; `file` is what errors call it, `folder` where its model's files are looked for first.

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
    anchor_model_files(raw, places, folder)
    return check_config(raw, places)


def check_config(raw: Any, places: Places) -> Config:
    """The config of what was read; raises RecipeError with a line for each problem and the place it was set."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        problems = [describe(details, raw, places) for details in error.errors(include_url=False)]
        raise RecipeError("\n".join(problems)) from error


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
    overridden = {key for key, place in places.items() if place.startswith("override ")}
    scaling = raw.get("scaling")
    if ("scaling", "method") not in overridden or not isinstance(scaling, dict):
        return
    if (method := scaling["method"]) in list(METHODS):
        for name in ScalingConfig.model_fields.keys() - {"method", "where", *method_options(method)}:
            if ("scaling", name) not in overridden:
                scaling.pop(name, None)


def anchor_model_files(raw: dict[str, Any], places: Places, folder: Path) -> None:
    """Make the paths of a network's code and weights absolute; those of an override are where it is given."""
    model = raw.get("model")
    for key, anchor in (("factory", anchored_factory), ("weights", anchored)):
        if isinstance(model, dict) and isinstance(model.get(key), str):
            place = places.get(("model", key), places[("model",)])
            model[key] = anchor(model[key], Path() if place.startswith("override ") else folder)


def yaml_with_lines(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """A document, and the line on which each of its keys and items stands, counted from 1.

    >>> yaml_with_lines("optim:\\n  lr: 1e-3\\n")
    ({'optim': {'lr': 0.001}}, {('optim',): 1, ('optim', 'lr'): 2})
    """
    lines: dict[KeyPath, int] = {}
    if len(text) > LARGEST_FILE:
        raise YamlError(1, f"has {len(text):,} letters; a recipe has at most {LARGEST_FILE:,}")
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return None if node is None else construct(loader, node, (), lines), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(mark.line + 1 if mark else 1, error.problem or "is not YAML") from error
    except yaml.reader.ReaderError as error:
        raise YamlError(text.count("\n", 0, error.position) + 1, f"is not text: {error.reason}") from error


def construct(loader: Loader, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    if len(path) > DEEPEST or len(lines) > MOST_KEYS:
        problem = TOO_DEEP if len(path) > DEEPEST else f"its aliases stand for more than {MOST_KEYS:,} keys"
        raise YamlError(node.start_mark.line + 1, problem)
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[(*path, number)] = item.start_mark.line + 1
        return [construct(loader, item, (*path, number), lines) for number, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return construct_scalar(loader, node)
    mapping = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        key = construct_scalar(loader, key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise YamlError(line, "a key must be text")
        if key in mapping:
            raise YamlError(line, f"{dotted((*path, key))} is already set on line {lines[(*path, key)]}")
        lines[(*path, key)] = line
        mapping[key] = construct(loader, value, (*path, key), lines)
    return mapping


def construct_scalar(loader: Loader, node: yaml.Node) -> Any:
    try:
        return loader.construct_object(node)
    except yaml.MarkedYAMLError:
        raise
    except Exception as error:  # What Python makes of a text that is not what its tag says.
        kind = node.tag.rpartition(":")[2]
        raise YamlError(node.start_mark.line + 1, f"{str(node.value)[:50]!r} is no {kind}") from error


def dotted(path: KeyPath) -> str:
    """The key as it is written in an override.

    >>> dotted(("optim", "betas", 1))
    'optim.betas[1]'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def unknown_key(path: KeyPath, raw: Any) -> str:
    """The problem with a key that does not exist: the closest ones that do, or all that stand beside it."""
    known = list(known_keys(Config, raw))
    similar = {key: similarity(str(path[-1]), str(key[-1])) for key in known}
    # Those of the same section come before others as good.
    scores = {key: score + 0.15 * (key[:-1] == path[:-1]) for key, score in similar.items() if score >= SIMILAR}
    close = [repr(dotted(key)) for key, score in scores.items() if score == max(scores.values())]
    if close:
        return f"unknown key; did you mean {' or '.join(close)}?"
    beside = ", ".join(str(key[-1]) for key in known if key[:-1] == path[:-1])
    return f"unknown key; {dotted(path[:-1]) or 'a recipe'} has {beside or 'no keys'}"


def similarity(name: str, other: str) -> float:
    """1 for the same name, almost as much for an abbreviation: learning_rate is lr."""
    if name != other and other == "".join(word[:1] for word in name.split("_")):
        return 0.95
    return difflib.SequenceMatcher(None, name, other).ratio()


def known_keys(section: type[BaseModel], raw: Any, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key that a recipe of this kind may have."""
    for name, field in section.model_fields.items():
        yield (*prefix, name)
        chosen = raw.get(name) if isinstance(raw, dict) else None
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and is_chosen(kind, chosen):
                yield from known_keys(kind, chosen, (*prefix, name))


def is_chosen(section: type[BaseModel], raw: Any) -> bool:
    """Whether a section is the one that its `kind`, if it has that key, asks for."""
    field = section.model_fields.get("kind")
    asked = raw.get("kind") if isinstance(raw, dict) else None
    return field is None or asked in get_args(field.annotation)


def describe(details: ErrorDetails, raw: Any, places: Places) -> str:
    """The place, the key and the problem."""
    path: KeyPath = details["loc"]
    if path[:1] == ("model",):  # pydantic names the chosen kind of model here, where a recipe has no key.
        path = (path[0], *path[2:])
    path, problem = find_problem(details, path, raw)
    place = path
    while place not in places:  # Where the key was set, or else the closest section around it.
        place = place[:-1]
    return f"{places[place]}: {dotted(path) or 'the recipe'}: {problem}"


def find_problem(details: ErrorDetails, path: KeyPath, raw: Any) -> tuple[KeyPath, str]:
    """The key that is wrong, which is below the path where pydantic names only the section, and what is wrong."""
    context, seen = details.get("ctx", {}), details["input"]
    match details["type"]:
        case "extra_forbidden":
            return path, unknown_key(path, raw)
        case "missing":
            return path, "is missing"
        case "union_tag_not_found":
            return (*path, "kind"), "is missing"
        case "union_tag_invalid":
            return (*path, "kind"), not_allowed(context["tag"], context["expected_tags"])
        case "literal_error":
            return path, not_allowed(seen, context["expected"])
        case "model_type" | "model_attributes_type":
            return path, f"must be a section with keys of its own, got {seen!r}"
        case "conflict":
            return (*path, context["key"]), context["message"]
    return path, f"{re.sub('^(Input|String|List|Tuple) should', 'must', details['msg'])}, got {seen!r}"


def not_allowed(seen: Any, expected: str) -> str:
    """A value that is none of those allowed, with the closest of them."""
    allowed = re.findall(r"'[^']*'|\d+", expected)
    close = difflib.get_close_matches(repr(seen), allowed, n=1)
    return f"must be one of {', '.join(allowed)}, got {seen!r}" + (f"; did you mean {close[0]}?" if close else "")
