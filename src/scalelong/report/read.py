"""The files of a run as they were written, and how any file is read: what is damaged becomes a warning on the page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, AliasChoices, Field, TypeAdapter, ValidationError

T = TypeVar("T")

Points = list[tuple[float, float | None]]
"""x and y of a series; None where the value is missing or not finite."""

Band = list[tuple[float, float, float]]
"""x, lower and upper end."""


def finite(value: float | None) -> float | None:
    """The value; None where it is infinite or not a number."""
    return value if value is not None and math.isfinite(value) else None


Finite = Annotated[float | None, AfterValidator(finite)]
"""JSON has no infinity and no NaN: the trainer writes them as text, and charts leave a gap."""


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; None where it could not be had."""

    value: Annotated[float | None, Field(validation_alias=AliasChoices("value", "difference"))] = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Of a paired test, for a difference."""
    bound: str | None = None
    """at least or at most, for a speed-up where the curves begin too late to show all of it."""

    @property
    def known(self) -> bool:
        return finite(self.value) is not None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends of the interval; None where one is not known."""
        if self.low is None or self.high is None or math.isnan(self.low) or math.isnan(self.high):
            return None
        return self.low, self.high


def read_file(path: Path, parse: Callable[[str], T], missing: T, warnings: list[str]) -> T:
    """What a file holds; `missing` if there is none, and with a warning if it is damaged."""
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return missing
    except OSError as error:
        problem = f"could not be read ({error.strerror or error})"
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        problem = f"holds something else than what is written there{f' (at {place})' if place else ''}"
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        problem = f"is broken or half-written ({' '.join(str(error).split())})"
    warnings.append(f"{short(path)} {problem}.")
    return missing


def read_json(path: Path, kind: type[T], missing: T, warnings: list[str]) -> T:
    return read_file(path, lambda text: checked(kind, json.loads(text)), missing, warnings)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(kind: type[T], content: Any) -> T:
    """The content as a record; raises ValidationError if it is something else."""
    return adapter(kind).validate_python(content)


def short(path: Path) -> str:
    """The file and the folder it is in, which is enough to find it."""
    return f"{path.parent.name}/{path.name}"


def setting(key: str) -> Any:
    return Field(validation_alias=key)


@dataclass(frozen=True)
class Config:
    """The settings of config.yaml, of which the page names some."""

    settings: dict[str, Any] = field(default_factory=dict)
    """All of them by their dotted keys."""
    name: str = "unknown recipe"
    description: str = ""
    seed: int | None = None
    source: Annotated[str | None, setting("data.source")] = None
    image_size: Annotated[int | None, setting("data.image_size")] = None
    channels: Annotated[int | None, setting("data.channels")] = None
    method: Annotated[str, setting("scaling.method")] = "none"
    kappa: Annotated[float | None, setting("scaling.kappa")] = None
    value: Annotated[float | None, setting("scaling.value")] = None
    where: Annotated[str | None, setting("scaling.where")] = None
    lr: Annotated[float | None, setting("optim.lr")] = None
    steps: Annotated[int | None, setting("training.steps")] = None
    batch_size: Annotated[int | None, setting("training.batch_size")] = None
    evaluate_every: Annotated[int | None, setting("evaluation.every")] = None


def parse_config(text: str) -> Config:
    flat = flatten(checked(dict[str, Any], yaml.safe_load(text)))
    return checked(Config, flat | {"settings": flat})


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> flatten({"a": {"b": 1}, "c": [2, 3]})
    {'a.b': 1, 'c': [2, 3]}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@dataclass(frozen=True)
class Environment:
    """What a run was started or resumed with, or a comparison ran in."""

    step: int = 0
    command: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    platform: str | None = None
    device: str | None = None
    processes: int | None = None
    threads: int | None = None
    workers: int | None = None
    precision: str | None = None
    started: str | None = None


@dataclass(frozen=True)
class Event:
    """A line of metrics.jsonl that says what happened."""

    step: int
    event: str
    message: str = ""
    origin: str = ""
    loss: float | None = None
    typical: float | None = None
    deviations: float = 0.0
    from_step: int | None = None


@dataclass(frozen=True)
class Record:
    """A line of metrics.jsonl with the numbers of a step."""

    step: int
    numbers: dict[str, float]


def parse_metrics(text: str, name: str, warnings: list[str]) -> tuple[list[Record], list[Event]]:
    """The lines of metrics.jsonl; a last line without its end is still being written, and left out."""
    records: list[Record] = []
    events: list[Event] = []
    broken = 0
    for line in text.split("\n")[:-1]:
        try:
            content = json.loads(line)
            if "event" in content:
                events.append(checked(Event, content))
            else:
                records.append(Record(int(content.pop("step")), checked(dict[str, float], content)))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            broken += bool(line.strip())
    if broken:
        warnings.append(f"{name} has {broken} broken line{'' if broken == 1 else 's'}, left out here.")
    return records, events


@dataclass(frozen=True)
class Evaluation:
    step: int
    figures: dict[str, Estimate]
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """What the figures depend on."""
    weights: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Kappa:
    """The advice of kappa.json."""

    kappa: float
    where: str | None = None
    band: tuple[Finite, Finite] = (None, None)
    num_skips: int | None = None
    sum_of_squares: tuple[Finite, ...] = ()
    block_gain: float | None = None
    images: int | None = None
    reasons: tuple[str, ...] = ()
