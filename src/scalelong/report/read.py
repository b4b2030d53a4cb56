"""Reads the files of runs and comparisons whatever state they are in: what cannot be read is noted, never raised."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]


@dataclass
class Notes:
    """What was wrong with the files, for the page to say; each thing once."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)


def read_text(path: Path, notes: Notes) -> str | None:
    """The text of a file; None, without a note, where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        notes.add(f"{short(path)} could not be read ({error.strerror or error}).")
        return None


def read_dict(path: Path, notes: Notes) -> dict[str, Any]:
    """The object in a JSON file; empty where it is missing, and with a note where it is broken or something else."""
    return as_dict(read_json(path, notes, lambda content: isinstance(content, Mapping)))


def read_dicts(path: Path, notes: Notes) -> list[dict[str, Any]]:
    """The objects in a JSON file that holds a list of them; noted as that of `read_dict`."""
    return as_dicts(read_json(path, notes, is_list_of_dicts))


def is_list_of_dicts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(item, Mapping) for item in content)


def read_json(path: Path, notes: Notes, is_meant: Callable[[Any], bool]) -> Any:
    text = read_text(path, notes)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        notes.add(f"{short(path)} is broken or half-written ({error}).")
        return None
    if not is_meant(content):
        notes.add(f"{short(path)} holds something else than what is written there.")
    return content


def read_yaml(path: Path, notes: Notes) -> dict[str, Any]:
    """The mapping in a YAML file; empty where there is none."""
    import yaml

    text = read_text(path, notes)
    try:
        content = None if text is None else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        notes.add(f"{short(path)} is broken or half-written ({' '.join(str(error).split())}).")
        return {}
    if text is not None and not isinstance(content, dict):
        notes.add(f"{short(path)} does not hold settings.")
    return as_dict(content)


def read_lines(path: Path, notes: Notes) -> list[dict[str, Any]]:
    """The objects of a file with one per line; a last line without its end is still being written, and left out."""
    text = read_text(path, notes) or ""
    found, broken = [], 0
    for line in text.split("\n")[:-1]:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict):
            found.append(content)
        elif line.strip():
            broken += 1
    if broken:
        notes.add(f"{short(path)} has {broken} broken line{'' if broken == 1 else 's'}, left out here.")
    return found


def short(path: Path) -> str:
    """The file and the folder it is in, which is enough to find it."""
    return f"{path.parent.name}/{path.name}"


def number(value: Any) -> float | None:
    """A number as it was written; JSON has no infinity and no NaN, so the trainer writes them as text.

    >>> number(2), number("inf"), number("nan"), number(None), number("x")
    (2.0, inf, nan, None, None)
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str) and value.strip().lower().lstrip("+-") not in ("nan", "inf", "infinity"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def finite(value: Any) -> float | None:
    """
    >>> finite(1.5), finite("inf"), finite("nan")
    (1.5, None, None)
    """
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def whole(value: Any) -> int | None:
    found = finite(value)
    return None if found is None else int(found)


def as_dict(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def as_dicts(value: Any) -> list[dict[str, Any]]:
    return [as_dict(item) for item in as_list(value) if isinstance(item, Mapping)]


def as_text(value: Any, default: str = "") -> str:
    """Text on one line, and of a length that a page can show."""
    if value is None or isinstance(value, Mapping | list | tuple):
        return default
    line = " ".join(str(value).split())
    return line if len(line) <= 2000 else f"{line[:2000]}…"


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; None where it could not be had."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, content: Any, value: str = "value") -> Estimate:
        """
        >>> Estimate.of({"value": 1.5, "low": 1.2, "high": "inf"})
        Estimate(value=1.5, low=1.2, high=inf)
        """
        found = as_dict(content)
        return cls(number(found.get(value)), number(found.get("low")), number(found.get("high")))

    @property
    def known(self) -> bool:
        return self.value is not None and math.isfinite(self.value)
