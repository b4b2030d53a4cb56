"""What a run writes down and says: metrics.jsonl, the trackers, and the display."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import Config, TrainingConfig
from .display import Display, Silent
from .guard import Verdict
from .metrics import MetricsLog
from .run import flatten
from .stopwatch import Stopwatch


class Journal:
    """Every process calls it alike; only the first writes and speaks."""

    def __init__(self, accelerator: Any, metrics: MetricsLog, config: TrainingConfig, display: Display | None) -> None:
        self.accelerator, self.metrics, self.config = accelerator, metrics, config
        self.is_main: bool = accelerator.is_main_process
        self.display = (display or Display()) if self.is_main else Silent()
        self.watch = Stopwatch(config.batch_size)

    def begin(self, config: Config) -> None:
        if self.config.trackers:
            self.accelerator.init_trackers("scalelong", config=printable(config))

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
            numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and key != "step"}
            self.accelerator.log(numbers, step=step)

    def log(self, step: int, **numbers: float) -> None:
        """The regular line: loss, rate and gradient norm, and how fast the run is."""
        record = {"step": step, **numbers, **self.watch.lap(step)}
        self.record(step, record)
        self.display.log(record, self.watch.seconds_left(step, self.config.steps))

    def step(self, step: int, verdict: Verdict) -> None:
        """Called after every step; writes only if the step was skipped."""
        self.display.step(step, verdict.loss)
        if verdict.event is None:
            return
        origin = self._first_origin(verdict)
        numbers = {"loss": verdict.loss, "grad_norm": verdict.grad_norm}
        self.record(step, {"event": "skipped", **numbers, "origin": origin})
        self.note(f"step {step} skipped: loss {verdict.loss:.4g}, {origin}")

    def _first_origin(self, verdict: Verdict) -> str:
        """Where a process found the non-finite number; the others may have had none in their part of the batch."""
        from accelerate.utils import gather_object

        own = verdict.event.origin if verdict.event else None
        found = gather_object([] if own is None else [(own.kind == "gradient", str(own))])
        # A process that was finite itself has received the others' gradients, and can blame only those.
        return min(found, key=lambda origin: origin[0], default=(True, "where it began could not be found"))[1]


def printable(config: Config) -> dict[str, Any]:
    """The settings as trackers take them: numbers and text by dotted key."""
    flat = flatten(config.model_dump(mode="json"))
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in flat.items()}
