"""Run a comparison: share the runs among processes, keep the results up to date, and lose nothing when stopped.

`compare(make_plan("digits", ["none", "cs"], seeds=5), "runs/digits-comparison")`
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from ..config import Config, summarise
from ..config.inputs import open_inputs
from ..evaluation import load_features
from ..training import train
from ..training.logger import Silent
from ..training.signals import StopSignals
from ..utils.atomic import locked
from . import jobs
from .collect import RunRecord, collect
from .folder import check_plan, now, read_plan, save_plan
from .grid import Plan, PlannedRun, only_training
from .jobs import End, Job, Running
from .progress import Display, Progress, RunState, read_progress
from .results import Metadata, write_results
from .results import summarise as summarise_results

ADVICE = "kappa.json"
TICK = 0.25
ATTEMPTS = 3
"""How many processes may die of one run before it counts as failed."""
SAVE_SECONDS = 120.0
"""How long a run may take to finish its step and save, once it is told to stop."""
TIMED_STEPS = 7


@dataclass(frozen=True)
class CompareResult:
    """How a comparison ended: its results, the signal that stopped it, and the runs that failed with the reason."""

    folder: Path
    results: dict[str, Any]
    signal: int | None
    failures: dict[str, str]


def compare(
    plan: Plan, out: str | Path, *, workers: int | None = None, display: Display | None = None, command: str = ""
) -> CompareResult:
    """Make the runs of a plan that are not there yet; the same call again resumes where it was stopped."""
    folder = Path(out)
    check_plan(folder, plan)
    if not read_plan(folder):
        check_needs(plan.arms[0].config)
    count = min(workers or default_workers(), len(plan.runs))
    with locked(folder / ".lock", f"another process is comparing in {folder}"):
        created = save_plan(folder, plan, command)
        return Launcher(plan, folder, count, display or Display(), command, created).run()


def check_needs(config: Config) -> None:
    """Raise, before anything is written, what would fail in every run: data or a feature network that is not there."""
    open_inputs(config)
    if config.evaluation.every is not None:
        load_features(config.evaluation.network)


def default_workers() -> int:
    """One for each GPU, or for each core."""
    return len(jobs.visible_gpus()) or jobs.available_cores()


class Launcher:
    """One call of a comparison: what runs, in what order, and what has ended."""

    def __init__(self, plan: Plan, folder: Path, workers: int, display: Display, command: str, created: str) -> None:
        self.plan, self.folder, self.workers, self.display = plan, folder, workers, display
        self.command, self.created = command, created
        self.threads = jobs.threads_each(workers)
        self.parameters = {arm.id: summarise(arm.config).parameters for arm in plan.arms}
        self.failures: dict[str, str] = {}
        self.warnings: list[str] = []
        self.lost: Counter[Path] = Counter()
        self.runs = {folder / run.folder: run for run in plan.runs}
        self.records = {str(run.folder): collect(folder, run) for run in plan.runs}
        self.progress = Progress(plan, {name: state_of(record) for name, record in self.records.items()})
        self.jobs = self._open_jobs()
        self.running: dict[int, Running] = {}
        """By slot."""
        self.stopping = False

    def run(self) -> CompareResult:
        results = self._write()
        with StopSignals() as signals:
            if self.jobs:
                results = self._work(signals)
        return CompareResult(self.folder, results, signals.received, self.failures)

    def _open_jobs(self) -> deque[Job]:
        """The runs that are not done, those that were begun first; the advice at the end, when a process is free."""
        runs = [run for run in self.plan.runs if self.records[str(run.folder)].outcome is None]
        runs.sort(key=lambda run: self.records[str(run.folder)].step == 0)
        logs = self.folder / "logs"
        found = deque(
            Job(self.folder / run.folder, run.config, logs / f"{run.arm.id}-{run.folder.name}.log", jobs.run)
            for run in runs
        )
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
            for running in self.running.values():
                running.process.kill()
                running.process.join()
            self.display.stop()
        return self._write()

    def _submit(self) -> None:
        """Start jobs in the slots that are free."""
        for slot in range(self.workers):
            if self.jobs and slot not in self.running:
                job = self.jobs.popleft()
                self.running[slot] = jobs.submit(job, slot, self.threads)
                if run := self.runs.get(job.path):
                    self.progress.advance(run, self.progress.state(run).step)

    def _poll(self) -> None:
        """Wait a moment, then see what has ended and how far the others are."""
        wait([running.process.sentinel for running in self.running.values()], TICK)
        for slot, running in list(self.running.items()):
            if (end := jobs.poll(running)) is not None:
                del self.running[slot]
                self._end(running.job, end)
            elif run := self.runs.get(running.job.path):
                step, loss = read_progress(running.job.path)
                if step != self.progress.state(run).step:
                    self.progress.advance(run, step)
                    self.progress.state(run).loss = loss
        self.display.update(self.progress)

    def _stop(self) -> None:
        """Let every run save; one that does not in time is killed, and later resumes from its last checkpoint."""
        self.stopping = True
        self.display.info("stopping: every run finishes its step and saves")
        self.jobs.clear()
        for running in self.running.values():
            jobs.stop(running)
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
        run = self.runs.get(job.path)
        if run is None:
            self.warnings += [f"no κ advice: {failure}"] if failure else []
            return
        name = str(run.folder)
        if failure:
            self.failures[name] = failure
        self.records[name] = collect(self.folder, run)
        self.progress.states[name] = state_of(self.records[name], failure)
        if not cut_off:
            outcome = self.records[name].outcome
            self.display.ended(self.progress, run, failure or (outcome.message if outcome is not None else None))
            self._write()

    def _write(self) -> dict[str, Any]:
        """Rewrite results.json and the tables from what the runs have so far."""
        active = {str(run.folder): run for one in self.running.values() if (run := self.runs.get(one.job.path))}
        self.records |= {name: collect(self.folder, run) for name, run in active.items()}
        seeds, arms = self.plan.seeds, self.plan.arms
        records = {arm.id: [self.records[str(PlannedRun(arm, seed).folder)] for seed in seeds] for arm in arms}
        metadata = Metadata(
            command=self.command,
            created=self.created,
            updated=now(),
            workers=self.workers,
            threads=self.threads,
            active=frozenset(active),
            failures=self.failures,
            warnings=self.warnings,
            parameters=self.parameters,
        )
        results = summarise_results(self.plan, records, metadata)
        write_results(self.folder, results)
        return results


def state_of(record: RunRecord, failure: str | None = None) -> RunState:
    """A run as its folder shows it; one that was begun waits to be resumed."""
    status = "failed" if failure is not None else "pending" if record.outcome is None else record.outcome.status
    return RunState(status, record.step, record.losses.last)


class StepTimes(Silent):
    """When each step of a run ended."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def step(self, step: int, loss: float) -> None:
        self.times.append(time.perf_counter())


def estimate_seconds(plan: Plan, workers: int) -> float:
    """The time of all runs, shared among the workers, at the speed of a few steps of the baseline in each setting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(jobs.threads_each(workers))
    try:
        speeds = [seconds_per_step(arm.config) for arm in plan.arms if arm.method == plan.baseline]
    finally:
        torch.set_num_threads(threads)
    return statistics.fmean(speeds) * plan.steps * len(plan.runs) / workers


def seconds_per_step(config: Config) -> float:
    """The median of a few steps after the first, of a run that leaves nothing behind."""
    display = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        if train(only_training(config, TIMED_STEPS + 1), folder, display=display).signal is not None:
            raise KeyboardInterrupt
    return statistics.median(later - earlier for earlier, later in zip(display.times, display.times[1:], strict=False))
