"""A run's folder as the page sees it: settings, numbers by step, events, evaluations and samples."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from ..utils.sessions import trained_seconds
from . import read
from .numbers import listed, plural, show
from .read import Points, finite

CONFIG, METRICS = "config.yaml", "metrics.jsonl"

METHOD_NAMES = {"none": "no scaling", "cs": "CS", "ls": "LS", "ls-individual": "LS individual", "uniform": "uniform"}


@dataclass(frozen=True)
class Run:
    folder: Path
    label: str
    config: read.Config
    starts: list[read.Environment]
    records: list[read.Record]
    all_events: list[read.Event]
    evaluations: list[read.Evaluation]
    kappa: read.Kappa | None
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
        if self.events("diverged"):
            return "diverged"
        if self.config.steps is None:
            return "unknown"
        return "finished" if self.last_step >= self.config.steps and not self.awaits_evaluation else "unfinished"

    @property
    def ended(self) -> str:
        """What is said where its curves stop early."""
        return "diverged" if self.state == "diverged" else ""

    @property
    def awaits_evaluation(self) -> bool:
        """Whether the last step's images are still to be evaluated, which may take minutes after the last step.

        A run without the evaluations that were due before has none to come: it was trained without an evaluator.
        """
        every, evaluated = self.config.evaluate_every, {one.step for one in self.evaluations}
        if every is None or self.config.steps is None or self.config.steps in evaluated:
            return False
        return bool(evaluated) or every >= self.config.steps

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
    def readings(self) -> list[read.Record]:
        """The lines of the monitor."""
        return [line for line in self.records if any(key.startswith(("skip", "block/")) for key in line.numbers)]

    @cached_property
    def skips(self) -> list[int]:
        names = {name for line in self.readings for name in line.numbers}
        return sorted({int(found[1]) for name in names if (found := re.match(r"skip(\d{1,6})/", name))})

    def events(self, kind: str) -> list[read.Event]:
        return [event for event in self.all_events if event.event == kind]

    @property
    def samples(self) -> list[tuple[str, Path]]:
        """Names and files of the grids sampled while training, in order, or else of those sampled afterwards."""
        grids = [(path, re.fullmatch(r"step-(\d{1,12})", path.stem)) for path in self.folder.glob("samples/step-*.png")]
        steps = sorted((int(match[1]), path) for path, match in grids if match)
        later = sorted(self.folder.glob("samples/*/grid.png"))
        return [(f"step {step:,}", path) for step, path in steps] or [(path.parent.name, path) for path in later]

    def event_lines(self) -> list[str]:
        """What was unusual, each kind in one sentence."""
        found = []
        for kind, noun in (("spike", "loss spike"), ("skipped", "skipped step"), ("overflow", "fp16 overflow")):
            if events := self.events(kind):
                steps = shortened([show(event.step) for event in events])
                found.append(f"{plural(len(events), noun)}: at step {steps}{cause(kind, events)}.")
        if back := self.events("rollback"):
            ways = shortened([f"from step {show(event.from_step)} to {show(event.step)}" for event in back])
            found.append(f"{plural(len(back), 'rollback')}: {ways}.")
        messages = [event.message for kind in ("oscillation", "diverged") for event in self.events(kind)]
        return found + [message[:1].upper() + message[1:] for message in messages if message]

    @property
    def shell_command(self) -> str:
        """The command of its first start as one would type it; empty where it is not known."""
        words = self.starts[0].command[1:] if self.starts else ()
        return shlex.join(["scalelong", *words]) if words else ""


def shortened(items: Sequence[str]) -> str:
    return ", ".join([*items[:5], *["…"][: len(items) > 5]])


def cause(kind: str, events: Sequence[read.Event]) -> str:
    """What a spike or a skipped step was, in a few words."""
    if kind == "spike":
        worst = max(events, key=lambda event: event.deviations)
        size, typical = show(worst.loss, 3), show(worst.typical, 3)
        return f"; the worst had loss {size} where {typical} was typical (step {show(worst.step)})"
    origins = Counter(event.origin for event in events if event.origin)
    return f"; {listed([origin for origin, _ in origins.most_common(2)])}" if origins else ""


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, METRICS))


def read_run(folder: Path, label: str) -> Run:
    warnings: list[str] = []
    config = read.read_file(folder / CONFIG, read.parse_config, read.Config(), warnings)
    if not (folder / CONFIG).is_file():
        warnings.append(f"{CONFIG} is missing: settings are not known.")
    starts = read.read_json(folder / "environment.json", list[read.Environment], [], warnings)
    metrics = folder / METRICS
    parse = partial(read.parse_metrics, name=read.short(metrics), warnings=warnings)
    records, events = read.read_file(metrics, parse, ([], []), warnings)
    evaluations = read.read_json(folder / "evaluation.json", list[read.Evaluation], [], warnings)
    kappa = read.read_json(folder / "kappa.json", read.Kappa, None, warnings)
    return Run(folder, label, config, starts, records, events, evaluations, kappa, tuple(warnings))


def distinct_labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart.

    >>> distinct_labels([Path("/a/cs/seed-0"), Path("/a/ls/seed-0")])
    ['cs/seed-0', 'ls/seed-0']
    """
    paths = [folder.absolute() for folder in folders]
    for count in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        labels = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(labels)) == len(set(paths)):
            return labels
    return [str(path) for path in paths]
