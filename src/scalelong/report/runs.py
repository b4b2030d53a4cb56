"""A run's folder as the page sees it: its files as they were written. What is damaged becomes a warning on the page."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from ..utils.records import damage_of_run, flatten, is_reading, trained_seconds, unsealed
from .numbers import Estimate, Finite, Points, finite, listed, plural, show

T = TypeVar("T")

CONFIG, METRICS = "config.yaml", "metrics.jsonl"

cached_adapter = cache(TypeAdapter)

METHOD_NAMES = {"none": "no scaling", "cs": "CS", "ls": "LS", "ls-individual": "LS individual", "uniform": "uniform"}


# How any file is read


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


def checked(kind: type[T], content: Any) -> T:
    """The content as a record; raises ValidationError if it is something else."""
    return cached_adapter(kind).validate_python(content)


def short(path: Path) -> str:
    """The file and the folder it is in, which is enough to find it."""
    return f"{path.parent.name}/{path.name}"


# What the files of a run hold


@dataclass(frozen=True)
class Config:
    """The settings of config.yaml that the page names, and all of them by their dotted keys."""

    settings: dict[str, Any] = field(default_factory=dict)
    name: str = "unknown recipe"
    description: str = ""
    seed: int | None = None
    source: Annotated[str | None, Field(validation_alias="data.source")] = None
    image_size: Annotated[int | None, Field(validation_alias="data.image_size")] = None
    channels: Annotated[int | None, Field(validation_alias="data.channels")] = None
    method: Annotated[str, Field(validation_alias="scaling.method")] = "none"
    kappa: Annotated[float | None, Field(validation_alias="scaling.kappa")] = None
    value: Annotated[float | None, Field(validation_alias="scaling.value")] = None
    where: Annotated[str | None, Field(validation_alias="scaling.where")] = None
    lr: Annotated[float | None, Field(validation_alias="optim.lr")] = None
    steps: Annotated[int | None, Field(validation_alias="training.steps")] = None
    batch_size: Annotated[int | None, Field(validation_alias="training.batch_size")] = None
    evaluate_every: Annotated[int | None, Field(validation_alias="evaluation.every")] = None


def parse_config(text: str) -> Config:
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise ValueError("it has aliases, which no run writes, and which could stand for more than fits into memory")
    flat = flatten(checked(dict[str, Any], yaml.safe_load(text)))
    return checked(Config, flat | {"settings": flat})


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
    state: str = ""


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
        warnings.append(f"{name} has {plural(broken, 'broken line')}, left out here.")
    return records, events


@dataclass(frozen=True)
class Evaluation:
    """An entry of evaluation.json; its figures depend on the fingerprint."""

    step: int
    figures: dict[str, Estimate]
    fingerprint: dict[str, Any] = field(default_factory=dict)
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


# The run


@dataclass(frozen=True)
class Run:
    folder: Path
    label: str
    config: Config
    starts: list[Environment]
    records: list[Record]
    all_events: list[Event]
    evaluations: list[Evaluation]
    kappa: Kappa | None
    warnings: tuple[str, ...]

    @cached_property
    def last_step(self) -> int:
        return max((line.step for line in (*self.records, *self.all_events)), default=0)

    @property
    def method(self) -> str:
        """The scaling in a few words, such as CS κ=0.7."""
        config = self.config
        parts = [METHOD_NAMES.get(config.method, config.method)]
        parts += [f"κ={show(config.kappa)}"] * bool(config.kappa) + [show(config.value)] * bool(config.value)
        return " ".join(parts + ["after the norm"] * (config.where == "after-norm"))

    @property
    def state(self) -> str:
        """diverged, finished, unfinished, or unknown where the settings do not say how long it should be."""
        steps, every, evaluated = self.config.steps, self.config.evaluate_every, {one.step for one in self.evaluations}
        if self.events("diverged"):
            return "diverged"
        if steps is None:
            return "unknown"
        # Its last samples may be evaluated minutes after the last step. Without the evaluations that were due before,
        # it was trained without an evaluator.
        awaits = every is not None and steps not in evaluated and (bool(evaluated) or every >= steps)
        return "unfinished" if self.last_step < steps or awaits else "finished"

    @property
    def ended(self) -> str:
        """What is said where its curves stop early."""
        return "diverged" if self.state == "diverged" else ""

    @property
    def status(self) -> str:
        of = f" of {self.config.steps:,}" if self.config.steps is not None and self.state != "finished" else ""
        words = {"diverged": "diverged at step", "finished": "finished at step", "unfinished": "unfinished: step"}
        return f"{words.get(self.state, 'step')} {self.last_step:,}{of}"

    def series(self, key: str) -> Points:
        """A number of metrics.jsonl by step; after a rollback the later value of a step counts."""
        found = {float(line.step): finite(line.numbers[key]) for line in self.records if key in line.numbers}
        return sorted(found.items())

    def last(self, key: str) -> float | None:
        """The last value of a number, finite or not."""
        return next((line.numbers[key] for line in reversed(self.records) if key in line.numbers), None)

    @property
    def seconds(self) -> float | None:
        """How long it was trained, over all its starts."""
        times = [(step, seconds) for step, seconds in self.series("seconds") if seconds is not None]
        return trained_seconds(times, [start.step for start in self.starts])

    def mean_of(self, pattern: str) -> Points:
        """At each step the mean of all numbers whose names match."""
        matches = re.compile(pattern)
        found: dict[float, float | None] = {}
        for line in self.records:
            if values := [value for key, value in line.numbers.items() if matches.fullmatch(key)]:
                found[line.step] = finite(sum(values) / len(values))
        return sorted(found.items())

    @cached_property
    def readings(self) -> list[Record]:
        """The lines of the monitor."""
        return [line for line in self.records if is_reading(line.numbers)]

    @cached_property
    def skips(self) -> list[int]:
        names = {name for line in self.readings for name in line.numbers}
        return sorted({int(found[1]) for name in names if (found := re.match(r"skip(\d{1,6})/", name))})

    @property
    def samples(self) -> list[tuple[str, Path]]:
        """Names and files of the grids sampled while training, in order, or else of those sampled afterwards."""
        grids = [(path, re.fullmatch(r"step-(\d{1,12})", path.stem)) for path in self.folder.glob("samples/step-*.png")]
        steps = sorted((int(match[1]), path) for path, match in grids if match)
        later = sorted(self.folder.glob("samples/*/grid.png"))
        return [(f"step {step:,}", path) for step, path in steps] or [(path.parent.name, path) for path in later]

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.all_events if event.event == kind]

    def event_lines(self) -> list[str]:
        """What was unusual, each kind in one sentence."""
        found = []
        for kind, noun in (("spike", "loss spike"), ("skipped", "skipped step"), ("overflow", "fp16 overflow")):
            if events := self.events(kind):
                steps = ", ".join([show(event.step) for event in events[:5]] + ["…"] * (len(events) > 5))
                found.append(f"{plural(len(events), noun)}: at step {steps}{cause(kind, events)}.")
        if back := self.events("rollback"):
            ways = [f"from step {show(event.from_step)} to {show(event.step)}" for event in back[:5]]
            found.append(f"{plural(len(back), 'rollback')}: {', '.join(ways + ['…'] * (len(back) > 5))}.")
        told = [event for event in self.events("state") if event.state != "steady"] + list(self.events("diverged"))
        messages = [event.message for event in told]
        return found + [message[:1].upper() + message[1:] for message in messages if message]

    @property
    def shell_command(self) -> str:
        """The command of its first start as one would type it; empty where it is not known."""
        words = self.starts[0].command[1:] if self.starts else ()
        return shlex.join(["scalelong", *words]) if words else ""


def cause(kind: str, events: Sequence[Event]) -> str:
    """What a spike or a skipped step was, in a few words."""
    if kind == "spike":
        worst = max(events, key=lambda event: event.deviations)
        size, typical = show(worst.loss, 3), show(worst.typical, 3)
        return f"; the worst had loss {size} where {typical} was typical (step {show(worst.step)})"
    origins = Counter(event.origin for event in events if event.origin)
    return f"; {listed([origin for origin, _ in origins.most_common(2)])}" if origins else ""


def parse_evaluations(text: str) -> list[Evaluation]:
    content = json.loads(text)
    return checked(list[Evaluation], [*map(unsealed, content)] if isinstance(content, list) else content)


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, METRICS))


def read_run(folder: Path, label: str) -> Run:
    warnings: list[str] = []
    config = read_file(folder / CONFIG, parse_config, Config(), warnings)
    if not (folder / CONFIG).is_file():
        warnings.append(f"{CONFIG} is missing: settings are not known.")
    starts = read_json(folder / "environment.json", list[Environment], [], warnings)
    parse = partial(parse_metrics, name=short(folder / METRICS), warnings=warnings)
    records, events = read_file(folder / METRICS, parse, ([], []), warnings)
    damages = [event.message for event in events if event.event == "log damaged"] + [damage_of_run(folder) or ""]
    warnings += [f"{short(folder / METRICS)}: {damage}." for damage in damages if damage]
    evaluations = read_file(folder / "evaluation.json", parse_evaluations, [], warnings)
    kappa = read_json(folder / "kappa.json", Kappa, None, warnings)
    return Run(folder, label, config, starts, records, events, evaluations, kappa, tuple(warnings))
