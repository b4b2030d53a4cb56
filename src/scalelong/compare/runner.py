"""Run a comparison: share the runs among workers, keep the results up to date, and lose nothing when stopped.

`compare(make_plan("digits", ["none", "cs"], seeds=5), "runs/digits-comparison")`
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config, summarise, to_yaml
from ..config.inputs import open_inputs
from ..evaluation import load_features
from ..runs import Run
from ..training.signals import StopSignals
from .advice import FILE as ADVICE
from .board import Board, RunState, Watcher
from .collect import RunRecord, collect
from .folder import check_plan, locked, now, read_plan, save_plan, write_json
from .plan import Plan, PlannedRun
from .pool import Message, Pool, available_cores, threads_each, visible_gpus
from .results import FILE, Circumstances
from .results import summarise as summarise_results
from .spreadsheets import write_spreadsheets

TICK = 0.25
ATTEMPTS = 3
"""How many workers may die of one run before it counts as failed."""
TAIL = 1 << 20
"""Bytes at the end of a run's metrics in which its last validation loss is looked for."""
SAVE_SECONDS = 120.0
"""How long a run may take to finish its step and save, once it is told to stop."""


@dataclass(frozen=True)
class Ending:
    """How a comparison ended: its results, the signal that stopped it, and the runs that failed with the reason."""

    folder: Path
    results: dict[str, Any]
    signal: int | None
    failures: dict[str, str]


@dataclass(frozen=True)
class Job:
    """Something for a worker to do: a run, or the κ advice where `run` is None."""

    path: Path
    config: Config
    run: PlannedRun | None = None

    def message(self, command: list[str]) -> Message:
        kind = "advice" if self.run is None else "run"
        return {"kind": kind, "path": str(self.path), "config": to_yaml(self.config), "command": command}


def compare(
    plan: Plan, out: str | Path, *, workers: int | None = None, watcher: Watcher | None = None, command: str = ""
) -> Ending:
    """Make the runs of a plan that are not there yet; the same call again goes on where it was stopped."""
    folder = Path(out)
    check_plan(folder, plan)
    if not read_plan(folder):
        check_needs(plan.arms[0].config)
    count = min(workers or default_workers(), len(plan.runs))
    with locked(folder) as kept_open:
        created = save_plan(folder, plan, command)
        return Conductor(plan, folder, count, watcher or Watcher(), command, created).run(kept_open)


def check_needs(config: Config) -> None:
    """Raise, before anything is written, what would fail in every run: data or a feature network that is not there."""
    open_inputs(config)
    if config.evaluation.every is not None:
        load_features(config.evaluation.network)


def default_workers() -> int:
    """One for each GPU, or for each core."""
    return len(visible_gpus()) or available_cores()


class Conductor:
    """One go at a comparison."""

    def __init__(self, plan: Plan, folder: Path, workers: int, watcher: Watcher, command: str, created: str) -> None:
        self.plan, self.folder, self.workers, self.watcher = plan, folder, workers, watcher
        self.command, self.created = command, created
        self.threads = threads_each(workers)
        self.parameters = tuple((arm.id, summarise(arm.config).parameters) for arm in plan.arms)
        self.failures: dict[str, str] = {}
        self.warnings: list[str] = []
        self.lost: Counter[Path] = Counter()
        self.active: set[str] = set()
        self.records = {str(run.folder): collect(folder, run) for run in plan.runs}
        self.board = Board(plan, {name: state_of(record) for name, record in self.records.items()})
        self.jobs = self._open_jobs()

    def run(self, kept_open: list[int]) -> Ending:
        results = self._write()
        with StopSignals() as signals:
            if self.jobs:
                results = self._work(kept_open, signals)
        return Ending(self.folder, results, signals.received, self.failures)

    def _open_jobs(self) -> deque[Job]:
        """The runs that are not done, those that were begun first; the advice at the end, when a worker is free."""
        runs = [run for run in self.plan.runs if self.records[str(run.folder)].outcome is None]
        runs.sort(key=lambda run: self.records[str(run.folder)].step == 0)
        jobs = deque(Job(self.folder / run.folder, run.config, run) for run in runs)
        if not (self.folder / ADVICE).is_file():
            jobs.append(Job(self.folder / ADVICE, self.plan.arms[0].config))
        return jobs

    def _work(self, kept_open: list[int], signals: StopSignals) -> dict[str, Any]:
        self.watcher.start(self.board)
        try:
            with Pool(self.workers, self.threads, self.folder, kept_open) as pool:
                while (self.jobs or pool.busy) and signals.received is None:
                    self._give(pool)
                    self._listen(pool)
                if signals.received is not None:
                    self._stop(pool)
        finally:
            self.watcher.stop()
        return self._write()

    def _give(self, pool: Pool) -> None:
        while self.jobs and (worker := pool.find_idle()) is not None:
            job = self.jobs.popleft()
            if job.run is not None:
                self.active.add(str(job.run.folder))
            worker.give(job, job.message(shlex.split(self.command) or sys.argv))

    def _listen(self, pool: Pool) -> None:
        for job, message in pool.listen(TICK):
            if message["kind"] == "progress" and job.run is not None:
                self.board.advance(job.run, message["step"])
                state = self.board.state(job.run)
                state.loss = last_loss(job.path) or state.loss
            elif message["kind"] == "end":
                status, reason = message["status"], message["message"]
                if not self._take_up_again(job, status, reason):
                    self._end(job, status, reason)
        self.watcher.update(self.board)

    def _end(self, job: Job, status: str, message: str | None) -> None:
        if job.run is None:
            if status in ("failed", "lost"):
                self.warnings.append(f"no κ advice: {message}")
            return
        name = str(job.run.folder)
        self.active.discard(name)
        if status in ("failed", "lost"):
            self.failures[name] = message or "failed"
        self.records[name] = collect(self.folder, job.run)
        self.board.states[name] = state_of(self.records[name], self.failures.get(name))
        if status != "stopped":
            self.watcher.ended(self.board, job.run, message)
            self._write()

    def _take_up_again(self, job: Job, status: str, message: str | None) -> bool:
        """Whether a job whose worker died, or alone was told to stop, is queued once more; a run goes on from its last
        checkpoint."""
        if status not in ("lost", "stopped"):
            return False
        # A run that saves and stops when somebody asks its worker to is not what workers die of.
        self.lost[job.path] += status == "lost"
        if self.lost[job.path] >= ATTEMPTS:
            return False
        self.watcher.note(f"{job.path}: {message or 'its worker was told to stop'}; it is taken up again")
        self.jobs.appendleft(job)
        return True

    def _stop(self, pool: Pool) -> None:
        """Let every run save; whoever does not in time is ended by the pool, and goes on from its last checkpoint."""
        self.watcher.note("stopping: every run finishes its step and saves")
        self.jobs.clear()
        pool.interrupt()
        end = time.monotonic() + SAVE_SECONDS
        while pool.busy and time.monotonic() < end:
            for job, message in pool.listen(TICK):
                if message["kind"] == "end":
                    status = "stopped" if message["status"] == "lost" else message["status"]
                    self._end(job, status, message["message"])

    def _write(self) -> dict[str, Any]:
        """Rewrite results.json and the tables from what the runs have so far."""
        for run in self.plan.runs:
            if str(run.folder) in self.active:
                self.records[str(run.folder)] = collect(self.folder, run)
        seeds = self.plan.seeds
        records = {
            arm.id: [self.records[str(PlannedRun(arm, seed).folder)] for seed in seeds] for arm in self.plan.arms
        }
        results = summarise_results(self.plan, records, self._circumstances())
        write_json(self.folder / FILE, results)
        write_spreadsheets(self.folder, results)
        return results

    def _circumstances(self) -> Circumstances:
        return Circumstances(
            command=self.command,
            created=self.created,
            updated=now(),
            workers=self.workers,
            threads=self.threads,
            active=frozenset(self.active),
            failures=tuple(self.failures.items()),
            warnings=tuple(self.warnings),
            parameters=self.parameters,
        )


def state_of(record: RunRecord, failure: str | None = None) -> RunState:
    """A run as its folder shows it; one that was begun waits to go on."""
    status = "failed" if failure is not None else "pending" if record.outcome is None else record.outcome.status
    return RunState(status, record.step, record.losses.last)


def last_loss(folder: Path) -> float | None:
    """The last validation loss of a run, from the end of its metrics."""
    path = Run(folder).metrics.path
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - TAIL)
        file.seek(start)
        whole = file.read().split(b"\n")[bool(start) : -1]
    lines = [line for line in whole if b'"validation_loss_ema"' in line]
    return float(json.loads(lines[-1])["validation_loss_ema"]) if lines else None
