"""What is wrong with a recipe, in the words of its keys: the place, the key, the problem and the closest key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .schema import Config
from .yaml_with_lines import KeyPath

SIMILAR = 0.6


def config_errors(error: ValidationError, raw: Any, places: Mapping[KeyPath, str]) -> list[str]:
    """One line for each problem, in the order of the recipe's sections."""
    return [_complaint(details, raw, places) for details in error.errors(include_url=False)]


def dotted(path: KeyPath) -> str:
    """The key as it is written in an override.

    >>> dotted(("optim", "betas", 1))
    'optim.betas[1]'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def place_of(path: KeyPath, places: Mapping[KeyPath, str]) -> str:
    """Where the key was set, or else the closest section around it."""
    while path not in places:
        path = path[:-1]
    return places[path]


def unknown_key(path: KeyPath, raw: Any) -> str:
    """The problem with a key that does not exist: the closest one that does, or all that stand beside it."""
    close = closest_keys(path, raw)
    if close:
        return f"unknown key; did you mean {' or '.join(repr(dotted(key)) for key in close)}?"
    beside = [str(key[-1]) for key in known_keys(Config, raw) if key[:-1] == path[:-1]]
    return f"unknown key; {dotted(path[:-1]) or 'a recipe'} has {', '.join(beside) or 'no keys'}"


def closest_keys(path: KeyPath, raw: Any) -> list[KeyPath]:
    """The known keys whose names are most similar; those of the same section come before others as good."""
    scores = {key: similarity(str(path[-1]), str(key[-1])) for key in known_keys(Config, raw)}
    best = {key: score + 0.15 * (key[:-1] == path[:-1]) for key, score in scores.items() if score >= SIMILAR}
    return [key for key, score in best.items() if score == max(best.values())]


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
            if isinstance(kind, type) and issubclass(kind, BaseModel) and _is_chosen(kind, chosen):
                yield from known_keys(kind, chosen, (*prefix, name))


def _is_chosen(section: type[BaseModel], raw: Any) -> bool:
    """Whether a section is the one that its `kind`, if it has that key, asks for."""
    field = section.model_fields.get("kind")
    wanted = raw.get("kind") if isinstance(raw, dict) else None
    return field is None or wanted in get_args(field.annotation)


def _complaint(details: ErrorDetails, raw: Any, places: Mapping[KeyPath, str]) -> str:
    path = tuple(_without_tag(details["loc"]))
    extra, problem = _problem(details, path, raw)
    path = (*path, *extra)
    return f"{place_of(path, places)}: {dotted(path) or 'the recipe'}: {problem}"


def _problem(details: ErrorDetails, path: KeyPath, raw: Any) -> tuple[KeyPath, str]:
    """What is wrong, and the key below the path that it is about, if pydantic names only the section."""
    context, seen = details.get("ctx", {}), details["input"]
    match details["type"]:
        case "extra_forbidden":
            return (), unknown_key(path, raw)
        case "missing":
            return (), "is missing"
        case "union_tag_not_found":
            return ("kind",), "is missing"
        case "union_tag_invalid":
            return ("kind",), choice(context["tag"], context["expected_tags"])
        case "literal_error":
            return (), choice(seen, context["expected"])
        case "model_type" | "model_attributes_type":
            return (), f"must be a section with keys of its own, got {seen!r}"
        case "conflict":
            return (context["key"],), context["message"]
    return (), f"{details['msg'].replace('Input should', 'must')}, got {seen!r}"


def choice(seen: Any, expected: str) -> str:
    """A value that is none of those allowed, with the closest of them."""
    allowed = re.findall(r"'[^']*'|\d+", expected)
    close = difflib.get_close_matches(repr(seen), allowed, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"must be one of {', '.join(allowed)}, got {seen!r}{hint}"


def _without_tag(loc: KeyPath) -> KeyPath:
    """pydantic names the chosen kind of model inside the path, where a recipe has no key."""
    return (loc[0], *loc[2:]) if loc[:1] == ("model",) else loc
