"""What a run writes down and says: metrics.jsonl, the trackers, and the display."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Protocol

from ..config.schema import Config
from ..guard.losses import Restoration, StepDecision, TrainingDiverged
from ..monitor import SkipMonitor
from ..runs.run_dir import Run, RunError
from ..utils.records import flatten
from .state import TrainState

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class RunLogger:
    """Every process calls it alike; only the first writes and speaks."""

    def __init__(self, run: Run, config: Config, display: Display | None, *, is_main: bool) -> None:
        check_trackers(config.training.trackers)
        self.run, self.config, self.is_main = run, config, is_main
        self.metrics = run.metrics
        self.display = (display or Lines()) if is_main else Silent()
        self.clock = Clock(config.training.batch_size)
        self.trackers: list[Any] = []

    def start_trackers(self) -> None:
        """By now the folder says what the run is, and metrics.jsonl ends where it resumes."""
        for name in self.config.training.trackers if self.is_main else ():
            try:
                self.trackers.append(TRACKERS[name](self.run, self.config))
            except Exception as error:  # Every tracker has errors of its own.
                raise RunError(f"training.trackers: could not start {name}: {error}") from error

    def start(self, step: int) -> None:
        """The loop is about to run."""
        self.clock.start(step)
        self.display.start(step, self.config.training.steps)

    def stop(self) -> None:
        self.display.stop()
        for tracker in self.trackers:
            with suppress(Exception):
                tracker.close()
        self.trackers.clear()

    def info(self, message: str) -> None:
        self.display.info(message)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, and its numbers to the trackers."""
        if not self.is_main:
            return
        self.metrics.write({"step": step, **values})
        # The loss of a single step does not belong into the series of means.
        prefix = f"{values['event']}/" if "event" in values else ""
        numbers = {prefix + key: value for key, value in values.items() if isinstance(value, int | float)}
        for tracker in self.trackers:
            tracker.log({key: value for key, value in numbers.items() if key != "step"}, step)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the log, and the recipe that it belongs to."""
        return {**self.metrics.facts(), "recipe": self.config.model_dump(mode="json")}

    def mark_damage(self, step: int, lost: str | None) -> None:
        """Say, and write where lines are missing, what was lost of the log before the run resumed."""
        if lost is not None:
            self.record(step, {"event": "log damaged", "message": lost})
            self.info(lost)

    def log(self, step: int, **numbers: float) -> None:
        """The regular line: loss, learning rate and gradient norm, and how fast the run is."""
        record = {"step": step, **numbers, **self.clock.lap(step)}
        self.record(step, record)
        self.display.log(record, self.clock.seconds_left(step, self.config.training.steps))

    def log_step(self, state: TrainState, decision: StepDecision) -> None:
        """Keep the loss of a step for the regular line, and log at once what was unusual about it."""
        spike = state.add_loss(decision.loss) if decision.ok else None
        if spike is not None:
            self.record(state.step, {"event": "spike", **asdict(spike)})
        if decision.action == "overflow":
            self.record(state.step, {"event": "overflow", "scale": state.scaler.get_scale()})
        self.display.step(state.step, decision.loss)

    def log_reading(self, step: int, monitor: SkipMonitor) -> None:
        """What the monitor read in a step, and what state the run is in where that has changed."""
        self.record(step, monitor.latest)
        status = monitor.status
        if status.since == step:
            self.record(step, {"event": "state", **asdict(status), "message": str(status)})
            self.info(f"step {step}: {status}")

    def log_skipped(self, step: int, decision: StepDecision, origin: str) -> None:
        numbers = {"loss": decision.loss, "grad_norm": decision.grad_norm}
        self.record(step, {"event": "skipped", **numbers, "origin": origin})
        self.info(f"step {step} skipped: loss {decision.loss:.4g}, {origin}")

    def log_restoration(self, restoration: Restoration) -> None:
        """The seat belt went back."""
        told = {"from_step": restoration.step, "factor": restoration.factor, "message": str(restoration)}
        self.record(restoration.back_to, {"event": "rollback", **told})
        self.clock.lap(restoration.back_to)  # The next speed counts from there.
        self.info(str(restoration))

    def log_end(self, step: int, error: TrainingDiverged) -> None:
        """The run cannot be saved; what a user may do with its checkpoints is said with it."""
        error.args = (f"{error}; other settings begin at a checkpoint: --resume CHECKPOINT --out OTHER",)
        self.record(step, {"event": "diverged", "message": str(error)})


class Display(Protocol):
    """What shows how a run trains: every method may be left out."""

    ends: bool = False
    """Whether the run is to be saved and to end after its validation, because what it said is enough."""

    def start(self, step: int, steps: int) -> None:
        """The loop is about to run from one step to another."""

    def step(self, step: int, loss: float) -> None:
        """Called after every step; cheap."""

    def log(self, record: Mapping[str, Any], seconds_left: float) -> None:
        """The numbers of a logged step."""

    def info(self, message: str) -> None:
        """Something happened."""

    def show_progress(self, what: str, done: float, total: int) -> None:
        """How far some work is that comes before the first step."""

    def stop(self) -> None:
        """The loop has ended, in whatever way."""

    def leave(self) -> None:
        """The process ends at once, perhaps because it hangs: leave the terminal as it was, and wait for nothing."""


class Silent(Display):
    """Says nothing: for all processes but the first."""


class Lines(Display):
    """Writes a title, and a line for each logged step and each event, to the logger unless told where."""

    def __init__(
        self,
        write: Callable[[str], None] = logger.info,
        show_progress: Callable[[str, float, int], None] | None = None,
        title: str = "",
    ) -> None:
        self.write, self.title, self.steps = write, title, 0
        self._show_progress, self._shown = show_progress, time.monotonic()

    def start(self, step: int, steps: int) -> None:
        self.steps = steps
        if self.title:
            self.write(self.title)

    def log(self, record: Mapping[str, Any], seconds_left: float) -> None:
        self.write(f"step {record['step']}/{self.steps}  {describe(record)}  {clock(seconds_left)} left")

    def info(self, message: str) -> None:
        self.write(message)

    def show_progress(self, what: str, done: float, total: int) -> None:
        if self._show_progress is not None:
            self._show_progress(what, done, total)
        elif time.monotonic() - self._shown > SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            self.write(f"{int(done)} of {total} {what}")


def describe(record: Mapping[str, Any]) -> str:
    """The numbers of a logged step.

    >>> describe({"step": 1, "loss": 0.5, "lr": 1e-3, "grad_norm": 2.0, "images_per_second": 640.0})
    'loss 0.5000  lr 1.0e-03  grad norm 2.00  640 images/s'
    """
    return (
        f"loss {record['loss']:.4f}  lr {record['lr']:.1e}  grad norm {record['grad_norm']:.2f}  "
        f"{record['images_per_second']:.0f} images/s"
    )


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3_700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Clock:
    """Counts images and steps by the wall clock."""

    def __init__(self, images_per_step: int) -> None:
        self.images_per_step = images_per_step
        self.start(0)

    def start(self, step: int) -> None:
        self._first_step = self._lap_step = step
        self._first_time = self._lap_time = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For work that is no part of training: no speed counts it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            away = time.perf_counter() - begin
            self._first_time, self._lap_time = self._first_time + away, self._lap_time + away

    def lap(self, step: int) -> dict[str, float]:
        """Seconds since the start, and images per second since the last lap; neither counts pauses."""
        now = time.perf_counter()
        speed = (step - self._lap_step) * self.images_per_step / max(now - self._lap_time, 1e-9)
        self._lap_step, self._lap_time = step, now
        return {"seconds": round(now - self._first_time, 3), "images_per_second": round(speed, 1)}

    def seconds_left(self, step: int, steps: int) -> float:
        done = max(step - self._first_step, 1)
        return (time.perf_counter() - self._first_time) / done * (steps - step)


class TensorBoard:
    """Event files in the run's folder; what a killed run had logged beyond the step it resumes from is not shown."""

    def __init__(self, run: Run, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "scalelong"
        self.writer = SummaryWriter(str(folder), purge_step=run.metrics.last_step() + 1)
        self.writer.add_hparams(printable(config), metric_dict={})
        self.writer.flush()

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, global_step=step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of the project scalelong, which keeps its id when it resumes and writes into the run's folder."""

    def __init__(self, run: Run, config: Config) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        place = run.folder
        self.session = wandb.init(
            project="scalelong", id=run_id(run), name=place.resolve().name, dir=str(place), resume="allow"
        )
        self.session.config.update(printable(config), allow_val_change=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.session.log(dict(values), step=step)

    def close(self) -> None:
        self.session.finish()


TRACKERS: dict[str, Callable[[Run, Config], Any]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_trackers(trackers: Sequence[str]) -> None:
    """Raise where a tracker is not installed, before anything is trained."""
    for tracker in trackers:
        if importlib.util.find_spec(tracker) is None:
            extra = "'scalelong[train]'" if tracker == "tensorboard" else tracker
            raise ImportError(f"training.trackers: {tracker} is not installed: pip install {extra}")


def run_id(run: Run) -> str:
    """A name for a run that stays when it resumes: made of its folder's name and its first start."""
    first = json.loads(run.environment_file.read_text(encoding="utf-8"))[0]
    return hashlib.sha256(json.dumps([run.folder.resolve().name, first]).encode()).hexdigest()[:16]


def printable(config: Config) -> dict[str, Any]:
    """The settings as trackers take them: numbers and text by dotted key."""
    flat = flatten(config.model_dump(mode="json"))
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in flat.items()}
