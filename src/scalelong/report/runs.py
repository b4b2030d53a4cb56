"""A run's folder as the page sees it: settings, numbers by step, events, evaluations and samples."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..utils.sessions import trained_seconds
from .numbers import Points, listed, plural, show
from .read import (
    Notes,
    as_dict,
    as_list,
    as_text,
    finite,
    number,
    read_dict,
    read_dicts,
    read_lines,
    read_yaml,
    whole,
)

CONFIG, METRICS = "config.yaml", "metrics.jsonl"

METHOD_NAMES = {"none": "no scaling", "cs": "CS", "ls": "LS", "ls-individual": "LS individual", "uniform": "uniform"}


@dataclass(frozen=True)
class Sample:
    """A grid of drawn images."""

    name: str
    step: int
    path: Path


@dataclass(frozen=True)
class RunFolder:
    folder: Path
    label: str
    config: dict[str, Any]
    starts: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    kappa: dict[str, Any]
    notes: tuple[str, ...]

    def setting(self, key: str) -> Any:
        """A setting by its dotted key; None where it is missing."""
        found: Any = self.config
        for part in key.split("."):
            found = as_dict(found).get(part)
        return found

    @property
    def recipe(self) -> str:
        return as_text(self.config.get("name"), "unknown recipe")

    @property
    def seed(self) -> int | None:
        return whole(self.config.get("seed"))

    @property
    def steps(self) -> int | None:
        return whole(self.setting("training.steps"))

    @cached_property
    def last_step(self) -> int:
        return max((step for line in self.lines if (step := whole(line.get("step"))) is not None), default=0)

    @property
    def method(self) -> str:
        return method_label(as_dict(self.config.get("scaling")))

    @property
    def state(self) -> str:
        """diverged, finished, unfinished, or unknown where the settings do not say how long it should be."""
        if self.events("diverged"):
            return "diverged"
        if self.steps is None:
            return "unknown"
        return "finished" if self.last_step >= self.steps and not self.awaits_evaluation else "unfinished"

    @property
    def awaits_evaluation(self) -> bool:
        """Whether the last step's images are still to be evaluated, which may take minutes after the last step.

        A run without the evaluations that were due before has none to come: it was trained without an evaluator.
        """
        every, evaluated = (
            finite(self.setting("evaluation.every")),
            {whole(one.get("step")) for one in self.evaluations},
        )
        if every is None or self.steps is None or self.steps in evaluated:
            return False
        return bool(evaluated) or every >= self.steps

    @property
    def status(self) -> str:
        of = f" of {self.steps:,}" if self.steps is not None else ""
        words = {"diverged": "diverged at step", "finished": "finished at step", "unfinished": "unfinished: step"}
        return f"{words.get(self.state, 'step')} {self.last_step:,}{'' if self.state == 'finished' else of}"

    def series(self, key: str) -> Points:
        """A number of metrics.jsonl by step; after a rollback the later value of a step counts."""
        found: dict[float, float | None] = {}
        for line in self.lines:
            step = finite(line.get("step"))
            if step is not None and key in line and "event" not in line:
                found[step] = finite(line[key])
        return sorted(found.items())

    def last(self, key: str) -> float | None:
        """The last value of a number, finite or not."""
        found = [line[key] for line in self.lines if key in line and "event" not in line]
        return number(found[-1]) if found else None

    @property
    def seconds(self) -> float | None:
        """How long it was trained, over all its starts."""
        times = [(step, seconds) for step, seconds in self.series("seconds") if seconds is not None]
        return trained_seconds(times, [finite(start.get("step")) or 0.0 for start in self.starts])

    def mean_of(self, pattern: str) -> Points:
        """At each step the mean of all numbers whose names match."""
        matches, found = re.compile(pattern), {}
        for line in self.lines:
            step = finite(line.get("step"))
            values = [value for key in line if matches.fullmatch(key) and (value := number(line[key])) is not None]
            if step is not None and values:
                mean = sum(values) / len(values)
                found[step] = mean if math.isfinite(mean) else None
        return sorted(found.items())

    @cached_property
    def readings(self) -> list[dict[str, Any]]:
        """The lines of the monitor; the event of an oscillation names a skip too."""
        found = [line for line in self.lines if "event" not in line]
        return [line for line in found if any(key.startswith(("skip", "block/")) for key in line)]

    @cached_property
    def skips(self) -> list[int]:
        names = {name for line in self.readings for name in line}
        return sorted({int(found[1]) for name in names if (found := re.match(r"skip(\d{1,6})/", name))})

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == kind]

    @property
    def samples(self) -> list[Sample]:
        """The grids drawn while training, in order, or else those that were drawn afterwards."""
        grids = sorted(self.folder.glob("samples/step-*.png"))
        found = [(path, re.fullmatch(r"step-(\d{1,12})", path.stem)) for path in grids]
        training = [Sample(f"step {int(match[1]):,}", int(match[1]), path) for path, match in found if match]
        later = [Sample(path.parent.name, self.last_step, path) for path in self.folder.glob("samples/*/grid.png")]
        return sorted(training, key=lambda sample: sample.step) or sorted(later, key=lambda sample: sample.name)


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, METRICS))


def read_run(folder: Path, label: str) -> RunFolder:
    notes = Notes()
    config = read_yaml(folder / CONFIG, notes)
    if not (folder / CONFIG).is_file():
        notes.add(f"{CONFIG} is missing: settings are not known.")
    starts = read_dicts(folder / "environment.json", notes)
    lines = read_lines(folder / METRICS, notes)
    evaluations = read_dicts(folder / "evaluation.json", notes)
    kappa = read_dict(folder / "kappa.json", notes)
    return RunFolder(folder, label, config, starts, lines, evaluations, kappa, tuple(notes.lines))


def method_label(scaling: dict[str, Any]) -> str:
    """
    >>> method_label({"method": "cs", "kappa": 0.7, "where": "input"}), method_label({})
    ('CS κ=0.7', 'no scaling')
    """
    method = as_text(scaling.get("method"), "none")
    parts = [METHOD_NAMES.get(method, method)]
    parts += [f"{sign}{show(scaling[key])}" for key, sign in (("kappa", "κ="), ("value", "")) if scaling.get(key)]
    parts += ["after the norm"] if scaling.get("where") == "after-norm" else []
    return " ".join(parts)


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


def event_lines(run: RunFolder) -> list[str]:
    """What was unusual about a run, each kind in one sentence."""
    found = []
    for kind, noun in (("spike", "loss spike"), ("skipped", "skipped step"), ("overflow", "fp16 overflow")):
        events = run.events(kind)
        if events:
            steps = [show(event.get("step")) for event in events[:5]]
            more = ", …" if len(events) > 5 else ""
            found.append(f"{plural(len(events), noun)}: at step {', '.join(steps)}{more}{cause(kind, events)}.")
    back = run.events("rollback")
    if back:
        ways = [f"from step {show(event.get('from_step'))} to {show(event.get('step'))}" for event in back[:5]]
        found.append(f"{plural(len(back), 'rollback')}: {', '.join(ways)}{', …' if len(back) > 5 else ''}.")
    messages = [as_text(event.get("message")) for kind in ("oscillation", "diverged") for event in run.events(kind)]
    found += [message[:1].upper() + message[1:] for message in messages if message]
    return found


def cause(kind: str, events: list[dict[str, Any]]) -> str:
    """What a spike or a skipped step was, in a few words."""
    if kind == "spike":
        worst = max(events, key=lambda event: finite(event.get("deviations")) or 0)
        size, typical = show(worst.get("loss"), 3), show(worst.get("typical"), 3)
        return f"; the worst had loss {size} where {typical} was typical (step {show(worst.get('step'))})"
    origins = Counter(as_text(event.get("origin")) for event in events if event.get("origin"))
    return f"; {listed([origin for origin, _ in origins.most_common(2)])}" if origins else ""


def shell_command(start: dict[str, Any]) -> str:
    """The command of a start as one would type it."""
    import shlex

    words = [str(word) for word in as_list(start.get("command"))]
    if not words:
        return ""
    return shlex.join(["scalelong", *words[1:]])
