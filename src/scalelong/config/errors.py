"""What is wrong with a recipe, in the words of its keys: the place, the key, the problem and the closest key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .schema import Config

KeyPath = tuple[str | int, ...]

SIMILAR = 0.6


def config_errors(error: ValidationError, raw: Any, places: Mapping[KeyPath, str]) -> list[str]:
    """One line for each problem, in the order of the recipe's sections."""
    return [_describe(details, raw, places) for details in error.errors(include_url=False)]


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
    if scores:
        best = max(scores.values())
        close = " or ".join(repr(dotted(key)) for key, score in scores.items() if score == best)
        return f"unknown key; did you mean {close}?"
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
            if isinstance(kind, type) and issubclass(kind, BaseModel) and _is_chosen(kind, chosen):
                yield from known_keys(kind, chosen, (*prefix, name))


def _is_chosen(section: type[BaseModel], raw: Any) -> bool:
    """Whether a section is the one that its `kind`, if it has that key, asks for."""
    field = section.model_fields.get("kind")
    asked = raw.get("kind") if isinstance(raw, dict) else None
    return field is None or asked in get_args(field.annotation)


def _describe(details: ErrorDetails, raw: Any, places: Mapping[KeyPath, str]) -> str:
    path: KeyPath = details["loc"]
    if path[:1] == ("model",):  # pydantic names the chosen kind of model here, where a recipe has no key.
        path = (path[0], *path[2:])
    below, problem = _problem(details, path, raw)
    path = place = (*path, *below)
    while place not in places:  # Where the key was set, or else the closest section around it.
        place = place[:-1]
    return f"{places[place]}: {dotted(path) or 'the recipe'}: {problem}"


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
            return ("kind",), _not_allowed(context["tag"], context["expected_tags"])
        case "literal_error":
            return (), _not_allowed(seen, context["expected"])
        case "model_type" | "model_attributes_type":
            return (), f"must be a section with keys of its own, got {seen!r}"
        case "conflict":
            return (context["key"],), context["message"]
    return (), f"{details['msg'].replace('Input should', 'must')}, got {seen!r}"


def _not_allowed(seen: Any, expected: str) -> str:
    """A value that is none of those allowed, with the closest of them."""
    allowed = re.findall(r"'[^']*'|\d+", expected)
    close = difflib.get_close_matches(repr(seen), allowed, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"must be one of {', '.join(allowed)}, got {seen!r}{hint}"
