"""What a run writes down and says: metrics.jsonl, the trackers, and the display."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.schema import Config, TrainingConfig
from ..guard.nonfinite import StepDecision
from ..runs.metrics import MetricsLog
from ..runs.run_dir import Run, RunError, flatten
from .display import Display, Silent
from .stopwatch import Stopwatch


class RunLogger:
    """Every process calls it alike; only the first writes and speaks."""

    def __init__(self, accelerator: Any, metrics: MetricsLog, config: TrainingConfig, display: Display | None) -> None:
        self.accelerator, self.metrics, self.config = accelerator, metrics, config
        self.is_main: bool = accelerator.is_main_process
        self.display = (display or Display()) if self.is_main else Silent()
        self.watch = Stopwatch(config.batch_size)

    def begin(self, config: Config) -> None:
        """ResumePoint the trackers; by now the folder says what the run is, and metrics.jsonl ends where it goes on."""
        if not self.config.trackers:
            return
        options = tracker_options(self.metrics) if self.is_main else {}
        try:
            self.accelerator.init_trackers("scalelong", config=printable(config), init_kwargs=options)
        except Exception as error:  # Every tracker has errors of its own.
            self._drop_trackers()
            names = ", ".join(self.config.trackers)
            raise RunError(f"training.trackers: could not start {names}: {error}") from error

    def start(self, step: int) -> None:
        self.watch.start(step)
        self.display.start(step, self.config.steps)

    def stop(self) -> None:
        self.display.stop()

    def note(self, message: str) -> None:
        self.display.note(message)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, and its numbers to the trackers."""
        if self.is_main:
            self.metrics.write({"step": step, **values})
        if self.config.trackers:
            # The loss of a single step does not belong into the series of means.
            prefix = f"{values['event']}/" if "event" in values else ""
            numbers = {prefix + key: value for key, value in values.items() if is_number(value) and key != "step"}
            self.accelerator.log(numbers, step=step)

    def log(self, step: int, **numbers: float) -> None:
        """The regular line: loss, rate and gradient norm, and how fast the run is."""
        record = {"step": step, **numbers, **self.watch.lap(step)}
        self.record(step, record)
        self.display.log(record, self.watch.seconds_left(step, self.config.steps))

    def step(self, step: int, verdict: StepDecision) -> None:
        """Called after every step; writes only if the step was skipped."""
        self.display.step(step, verdict.loss)
        if verdict.event is None:
            return
        origin = self._first_origin(verdict)
        numbers = {"loss": verdict.loss, "grad_norm": verdict.grad_norm}
        self.record(step, {"event": "skipped", **numbers, "origin": origin})
        self.note(f"step {step} skipped: loss {verdict.loss:.4g}, {origin}")

    def _drop_trackers(self) -> None:
        """End those that did start; one that did not would fail again at the end of the run, and hide why."""
        for tracker in self.accelerator.trackers:
            with suppress(Exception):
                tracker.finish()
        self.accelerator.trackers.clear()

    def _first_origin(self, verdict: StepDecision) -> str:
        """Where a process found the non-finite number; the others may have had none in their part of the batch."""
        from accelerate.utils import gather_object

        own = verdict.event.origin if verdict.event else None
        found = gather_object([] if own is None else [(own.kind == "gradient", str(own))])
        # A process that was finite itself has received the others' gradients, and can blame only those.
        return min(found, key=lambda origin: origin[0], default=(True, "where it began could not be found"))[1]


def tracker_options(metrics: MetricsLog) -> dict[str, dict[str, Any]]:
    """What makes a tracker go on with a run instead of beginning another, and write nowhere but in its folder."""
    folder = metrics.path.parent
    return {
        "tensorboard": {"purge_step": metrics.last_step() + 1},
        "wandb": {"id": run_id(folder), "name": folder.resolve().name, "dir": str(folder), "resume": "allow"},
    }


def run_id(folder: Path) -> str:
    """A name for a run that stays when it goes on: made of its folder's name and its first start."""
    first = json.loads(Run(folder).environment_file.read_text(encoding="utf-8"))[0]
    return hashlib.sha256(json.dumps([folder.resolve().name, first]).encode()).hexdigest()[:16]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def printable(config: Config) -> dict[str, Any]:
    """The settings as trackers take them: numbers and text by dotted key."""
    flat = flatten(config.model_dump(mode="json"))
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in flat.items()}
