"""Run a comparison: share the runs among processes, keep the results up to date, and lose nothing when stopped.

`compare(make_plan("digits", ["none", "cs"], seeds=5), "runs/digits-comparison")`
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from ..config import Config
from ..config import summarise as summarise_recipe
from ..config.build import open_inputs
from ..data.config import DataConfig, DataError
from ..data.dataset import open_images
from ..evaluation import load_features
from ..runs import Run, read_metrics
from ..training import train
from ..training.logger import Silent
from ..training.parallel import StopSignals
from ..utils.atomic import locked
from . import jobs, outcome
from .collect import RunRecord, collect
from .grid import Arm, Plan, PlannedRun, check_plan, save_plan, with_training
from .jobs import ADVICE, End, Job
from .results import Metadata, summarise, write_results

EMBEDDED = "sklearn:"  # Sets that are small, and part of a package.
TICK = 0.25
TAIL = 1 << 20  # Bytes at the end of a run's metrics in which its last validation loss is looked for.
ATTEMPTS = 3  # How many processes may die of one run before it counts as broken.
SAVE_SECONDS = 120.0  # How long a run may take to finish its step and save, once it is told to stop.
TIMED_STEPS = 7


@dataclass
class RunState:
    """One run as it is now; `loss` is its last validation loss."""

    status: str
    step: int
    loss: float | None = None


@dataclass
class Progress:
    """The state of every run, by folder, and the speed since the command began."""

    plan: Plan
    states: dict[str, RunState]
    began: float = 0.0  # When the first run was started.
    trained: int = 0  # Steps that were made since then.

    def state(self, run: PlannedRun) -> RunState:
        return self.states[str(run.folder)]

    def of_arm(self, arm: Arm) -> list[RunState]:
        return [self.state(PlannedRun(arm, seed)) for seed in self.plan.seeds]

    @property
    def ended(self) -> int:
        return sum(state.status in ("finished", "failed", "broken") for state in self.states.values())

    def advance(self, run: PlannedRun, step: int) -> None:
        """A run is at this step now; the first call for a run says where it starts or resumes."""
        state = self.state(run)
        self.began = self.began or time.monotonic()
        if state.status == "running":
            self.trained += max(0, step - state.step)
        state.status, state.step = "running", step

    def seconds_left(self) -> float | None:
        """By the speed since the command began; None before there is any."""
        elapsed = time.monotonic() - self.began
        unfinished = [state for state in self.states.values() if state.status in ("pending", "running")]
        steps = sum(self.plan.steps - state.step for state in unfinished)
        return elapsed / self.trained * steps if self.trained else None


class Display:
    """What a comparison shows while it runs; this one shows nothing."""

    def start(self, progress: Progress) -> None:
        """Called once, before the first run starts."""

    def update(self, progress: Progress) -> None:
        """Called several times a second."""

    def ended(self, progress: Progress, run: PlannedRun, message: str | None) -> None:
        """A run has ended, in whatever way."""

    def info(self, message: str) -> None:
        """Something that the user should know at once."""

    def stop(self) -> None:
        """Nothing is running any more."""


@dataclass(frozen=True)
class CompareResult:
    """How a comparison ended: its results, the signal that stopped it, and the runs that broke with the reason.

    `left` are the runs that are still to be made, and the advice.
    """

    folder: Path
    results: dict[str, Any]
    signal: int | None
    failures: dict[str, str]
    left: tuple[Path, ...] = ()


def compare(
    plan: Plan,
    out: str | Path,
    *,
    workers: int | None = None,
    display: Display | None = None,
    command: str = "",
    trains: bool = True,
) -> CompareResult:
    """Make the runs of a plan that are not there yet; the same call again resumes where it was stopped.

    Without `trains` it only takes up what others have made of them by `scalelong job`.
    """
    folder, config = Path(out), plan.arms[0].config
    if not check_plan(folder, plan) and trains:
        keep_images(config.data)
        # What would fail in every run is an error before anything is written: missing data, or a missing network.
        open_inputs(config)
        if config.evaluation.every is not None:
            load_features(config.evaluation.network)
    with locked(folder / ".lock", f"another process is comparing in {folder}"):
        created = save_plan(folder, plan, command)
        found = Launcher(plan, folder, count_workers(plan, workers), display or Display(), command, created)
        return found.run() if trains else found.end(found.write())


def count_workers(plan: Plan, asked: int | None = None) -> int:
    """As many as asked for, or else one for each GPU, or for each core; not more than there are runs."""
    return min(asked or len(jobs.visible_gpus()) or jobs.available_cores(), len(plan.runs))


def keep_images(data: DataConfig) -> None:
    """Decode the images once, into the image cache that every run reads; where they do not fit there, each decodes."""
    if not data.source.startswith(EMBEDDED):
        with suppress(DataError):
            open_images(data.model_copy(update={"memory_gb": 0}))


class Launcher:
    """One call of a comparison: what runs, in what order, and what has ended."""

    def __init__(self, plan: Plan, folder: Path, workers: int, display: Display, command: str, created: str) -> None:
        self.plan, self.folder, self.workers, self.display = plan, folder, workers, display
        self.metadata = Metadata(command, created, workers, jobs.threads_each(workers), count_parameters(plan))
        self.failures = self.metadata.failures
        self.lost: Counter[Path] = Counter()
        self.runs = {folder / run.folder: run for run in plan.runs}
        self.records = {str(run.folder): collect(folder, run) for run in plan.runs}
        self.failures |= {name: record.damage for name, record in self.records.items() if record.damage}
        states = {name: state_of(record, record.damage) for name, record in self.records.items()}
        self.progress = Progress(plan, states)
        self.jobs = self._open_jobs()
        self.running: dict[int, tuple[Job, Any]] = {}  # With its process, by slot.
        self.stopping = False

    def run(self) -> CompareResult:
        results = self.write()
        with StopSignals() as signals:
            if self.jobs:
                results = self._work(signals)
        return self.end(results, signals.received)

    def end(self, results: dict[str, Any], signal: int | None = None) -> CompareResult:
        return CompareResult(self.folder, results, signal, self.failures, tuple(job.path for job in self.jobs))

    def _open_jobs(self) -> deque[Job]:
        """The runs that are not done, those that were begun first; the advice at the end, when a process is free."""
        pairs = ((run, self.records[str(run.folder)]) for run in self.plan.runs)
        runs = [run for run, record in pairs if record.outcome is None and record.damage is None]
        runs.sort(key=lambda run: self.records[str(run.folder)].step == 0)
        logs, found = self.folder / "logs", deque[Job]()
        work = outcome.run_until_failed if self.plan.edge_rates else outcome.run
        for run in runs:
            log = logs / f"{run.arm.id}-{run.folder.name}.log"
            found.append(Job(self.folder / run.folder, run.config, log, work))
        if not (self.folder / ADVICE).is_file():
            found.append(Job(self.folder / ADVICE, self.plan.arms[0].config, logs / "kappa.log", jobs.write_advice))
        return found

    def _work(self, signals: StopSignals) -> dict[str, Any]:
        self.display.start(self.progress)
        try:
            while (self.jobs or self.running) and signals.received is None:
                self._submit()
                self._poll()
            if self.running:
                self._stop()
        finally:
            for _, process in self.running.values():
                process.kill()
                process.join()
            self.display.stop()
        return self.write()

    def _submit(self) -> None:
        """Start jobs in the slots that are free."""
        for slot in range(self.workers):
            if self.jobs and slot not in self.running:
                job = self.jobs.popleft()
                self.running[slot] = job, jobs.submit(job, slot, self.metadata.threads)
                if run := self.runs.get(job.path):
                    self.progress.advance(run, self.progress.state(run).step)

    def _poll(self) -> None:
        """Wait a moment, then see what has ended and how far the others are."""
        wait([process.sentinel for _, process in self.running.values()], TICK)
        for slot, (job, process) in list(self.running.items()):
            if (end := jobs.poll(job, process)) is not None:
                del self.running[slot]
                self._end(job, end)
            elif run := self.runs.get(job.path):
                step, loss = read_progress(job.path)
                if step != self.progress.state(run).step:
                    self.progress.advance(run, step)
                    self.progress.state(run).loss = loss
        self.display.update(self.progress)

    def _stop(self) -> None:
        """Let every run save; one that does not in time is killed, and later resumes from its last checkpoint."""
        self.stopping = True
        self.display.info("stopping: every run finishes its step and saves")
        self.jobs.clear()
        for _, process in self.running.values():
            process.terminate()  # Where the system has done so already, as a cluster does, it does not matter.
        deadline = time.monotonic() + SAVE_SECONDS
        while self.running and time.monotonic() < deadline:
            self._poll()

    def _end(self, job: Job, end: End) -> None:
        """A job has ended. One that was cut off is queued again, unless too many processes have died of it."""
        # A run that saves and stops when somebody asks its process to is not what processes die of.
        self.lost[job.path] += end.status == "lost"
        cut_off = end.status == "stopped" or (end.status == "lost" and self.lost[job.path] < ATTEMPTS)
        if cut_off and not self.stopping:
            self.display.info(f"{job.path}: {end.message}; it is resumed")
            self.jobs.appendleft(job)
            return
        failure = (end.message or "failed") if end.status in ("failed", "lost") and not cut_off else None
        if run := self.runs.get(job.path):
            self._end_run(run, failure, cut_off)
        elif failure:
            self.metadata.warnings.append(f"no κ advice: {failure}")

    def _end_run(self, run: PlannedRun, failure: str | None, cut_off: bool) -> None:
        name, record = str(run.folder), collect(self.folder, run)
        if failure := failure or record.damage:
            self.failures[name] = failure
        self.records[name], self.progress.states[name] = record, state_of(record, failure)
        if not cut_off:
            message = record.outcome.message if record.outcome is not None else None
            self.display.ended(self.progress, run, failure or message)
            self.write()

    def write(self) -> dict[str, Any]:
        """Rewrite results.json and the tables from what the runs have so far."""
        active = {str(run.folder): run for job, _ in self.running.values() if (run := self.runs.get(job.path))}
        self.records |= {name: collect(self.folder, run) for name, run in active.items()}
        self.metadata.active = set(active)
        seeds, arms = self.plan.seeds, self.plan.arms
        records = {arm.id: [self.records[str(PlannedRun(arm, seed).folder)] for seed in seeds] for arm in arms}
        results = summarise(self.plan, records, self.metadata)
        write_results(self.folder, results)
        return results


def count_parameters(plan: Plan) -> dict[str, int]:
    """Of each arm; those that differ in the learning rate or the batch size only have the same network."""
    sizes = {arm.id: (arm.method, arm.axes["depth"], arm.axes["width"]) for arm in plan.arms}
    networks = {sizes[arm.id]: arm.config for arm in plan.arms}
    counts = {key: summarise_recipe(config).parameters for key, config in networks.items()}
    return {name: counts[key] for name, key in sizes.items()}


def state_of(record: RunRecord, failure: str | None = None) -> RunState:
    """A run as its folder shows it; one that was begun waits to be resumed."""
    status = "broken" if failure is not None else "pending" if record.outcome is None else record.outcome.status
    return RunState(status, record.step, next(reversed(record.losses.values()), None))


def read_progress(folder: Path) -> tuple[int, float | None]:
    """The step of a run and its last validation loss, from the end of its metrics."""
    path = Run(folder).metrics.path
    if not path.is_file():
        return 0, None
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - TAIL)
        file.seek(start)
        lines = file.read().split(b"\n")[bool(start) : -1]
    validated = [line for line in lines if b'"validation_loss_ema"' in line]
    step = json.loads(lines[-1])["step"] if lines else 0
    return step, float(json.loads(validated[-1])["validation_loss_ema"]) if validated else None


def estimate_seconds(plan: Plan, workers: int) -> float:
    """The time of all runs, shared among the workers, at the speed of a few steps of the baseline in each setting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(jobs.threads_each(workers))
    try:
        sizes = {
            (arm.place, arm.axes["depth"], arm.axes["batch"]): arm for arm in plan.arms if arm.method == plan.baseline
        }
        speeds = [time_step(arm.config) for arm in sizes.values()]
    finally:
        torch.set_num_threads(threads)
    return fmean(speeds) * plan.steps * len(plan.runs) / workers


def time_step(config: Config) -> float:
    """The median seconds of a few steps after the first, in a run that does nothing else and leaves nothing behind."""
    nothing = dict.fromkeys(("validate_every", "sample_every", "monitor_every"))
    steps = {"steps": TIMED_STEPS + 1, "checkpoint_every": TIMED_STEPS + 1, "keep_last": 1, "log_every": 1}
    config = with_training(config, {**nothing, **steps})
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": None})})
    with tempfile.TemporaryDirectory() as folder:
        if train(config, folder, display=Silent()).signal is not None:
            raise KeyboardInterrupt
        times = [line["seconds"] for line in read_metrics(Run(Path(folder)).metrics.path) if "seconds" in line]
    return median(later - earlier for earlier, later in pairwise(times))
