"""Why a run collapsed: it is replayed from its last good checkpoint with one change at a time.

`ask_why("runs/mine")` writes why.json into the run's folder. What was replayed is not replayed again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean
from typing import Any

from ..monitor.readings import with_nulls
from ..runs import Run, RunError
from ..training.parallel import StopSignals
from ..utils.atomic import locked, write_signed
from . import jobs
from .causes import UNCHANGED, Tally, Verdict, conclude, is_open
from .collapse import Collapse, find_collapse
from .jobs import End, Job
from .replay import Ended, Task, read_ended, run_replay
from .run import ATTEMPTS, SAVE_SECONDS, TICK, read_progress
from .trials import Trial, plan_trials, unchanged_trial, watched

FILE, FOLDER = "why.json", "why"
Show = Callable[[str, float, int], None]


@dataclass(frozen=True)
class WhyResult:
    """What why.json says, and the signal that stopped the command before it was known."""

    file: Path
    content: dict[str, Any]
    signal: int | None = None


class Stopped(Exception):
    """A signal came; everything is saved."""


def ask_why(
    folder: str | Path,
    *,
    replays: int = 4,
    after: int | None = None,
    start: int | None = None,
    workers: int | None = None,
    show: Show = lambda what, done, total: None,
    say: Callable[[str], None] = lambda line: None,
    allow_code: bool = False,
) -> WhyResult:
    """Replay a run's collapse; the same call again goes on where it was stopped.

    `replays` of each change at least (twice as many where chance decides), `after` steps past the collapse, from the
    checkpoint of step `start`.
    """
    run = Run(Path(folder))
    found = find_collapse(run, start=start, allow_code=allow_code)
    with locked(run.folder / FOLDER / ".lock", f"another process asks why in {run.folder}"), StopSignals() as signals:
        inquiry = Inquiry(run, found, replays, after, workers or jobs.available_cores(), signals, show, say)
        try:
            content = inquiry.run()
        except Stopped:
            return WhyResult(run.folder / FILE, {}, signals.received)
    write_signed(run.folder / FILE, with_nulls(content))
    return WhyResult(run.folder / FILE, content)


class Inquiry:
    """The replays of one run: which are wanted, and what they said."""

    def __init__(
        self,
        run: Run,
        found: Collapse,
        replays: int,
        after: int | None,
        workers: int,
        signals: StopSignals,
        show: Show,
        say: Callable[[str], None],
    ) -> None:
        self.started, self.found, self.replays, self.after = run, found, replays, after
        self.workers, self.signals, self.show, self.say = workers, signals, show, say
        self.folder = run.folder / FOLDER
        self.failures: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        base, survived = self.reproduce()
        exact = self.folder / base.name(0)
        trials, left_out = plan_trials(base, self.found, exact)
        self.make([(base, draw) for draw in range(1, self.replays)])
        unchanged, most = self.tally(base), self.replays
        if unchanged.saved:  # Chance decides, which more replays tell better.
            most *= 2
            self.make([(base, draw) for draw in range(self.replays, most)])
            unchanged = self.tally(base)
        for draw in range(most):
            wanted = [trial for trial in trials if is_open(self.tally(trial), unchanged, most)]
            self.make([(trial, draw) for trial in wanted if not self.is_broken(trial)])
        tallies = [unchanged, *(self.tally(trial) for trial in trials)]
        return self.describe(base, trials, tallies, left_out, survived)

    def reproduce(self) -> tuple[Trial, list[int]]:
        """The replay that collapses as the run did, from the earliest checkpoint that leads there; and the steps of
        those from which it survives, which are never what training did: chance, or a change from outside."""
        survived = []
        for checkpoint in self.found.checkpoints:
            trial = unchanged_trial(self.started, self.found, checkpoint, self.after)
            self.make([(watched(trial), 0)])
            ended = read_ended(self.folder / trial.name(0))
            if ended is None:
                raise RunError(
                    f"the run cannot be replayed: {next(iter(self.failures.values()), 'no reason is known')}"
                )
            if ended.dipped:
                return trial, survived
            survived.append(checkpoint.step)
        return unchanged_trial(self.started, self.found, self.found.checkpoints[0], self.after), survived

    def is_broken(self, trial: Trial) -> bool:
        """Whether a replay of it ended with an error, as others would."""
        return any(name.startswith(f"{trial.change.id}-{trial.task.step}-") for name in self.failures)

    def tally(self, trial: Trial) -> Tally:
        found = [read_ended(self.folder / trial.name(draw)) for draw in range(2 * self.replays)]
        ended = [one for one in found if one is not None]
        losses = [one.loss for one in ended if one.saved and one.loss is not None]
        return Tally(trial.change, len(losses), len(ended), fmean(losses) if losses else None)

    # Replays in processes

    def make(self, wanted: Sequence[tuple[Trial, int]]) -> None:
        """Make these replays, those that are there already aside; raises Stopped if a signal comes."""
        missing = [pair for pair in wanted if read_ended(self.folder / pair[0].name(pair[1])) is None]
        work_off(
            deque(self.job(*pair) for pair in missing),
            min(self.workers, len(missing)),
            self.signals,
            self.end,
            partial(self.progress, missing),
        )
        if self.signals.received is not None:
            raise Stopped

    def job(self, trial: Trial, draw: int) -> Job:
        name = trial.name(draw)
        task = replace(trial.task, draw=draw)
        log = self.folder / "logs" / f"{name.name}.log"
        return Job(self.folder / name, trial.config, log, partial(run_replay, task))

    def end(self, job: Job, end: End) -> None:
        ended = read_ended(job.path)
        if ended is None:
            self.failures[job.path.name] = end.message or "it ended without a word"
            self.say(f"{job.path.name}: {self.failures[job.path.name]}")
        else:
            self.say(f"{job.path.name}: {describe_end(ended)}")

    def progress(self, wanted: Sequence[tuple[Trial, int]], waiting: int) -> None:
        """How many replays are done, those that run counted by their steps."""
        shares = []
        for trial, draw in wanted:
            folder, task = self.folder / trial.name(draw), trial.task
            if (folder / "replay.json").is_file():
                shares.append(1.0)
            elif (step := read_progress(folder)[0]) > task.step:
                shares.append((step - task.step) / (task.end - task.step))
        self.show("replays", sum(shares), len(wanted))

    # What they say

    def describe(
        self,
        base: Trial,
        trials: Sequence[Trial],
        tallies: Sequence[Tally],
        left_out: dict[str, str],
        survived: list[int],
    ) -> dict[str, Any]:
        verdict, task = conclude(tallies), base.task
        by_id = {trial.change.id: trial for trial in trials}
        exact = read_ended(self.folder / base.name(0))
        reproduced = exact is not None and exact.dipped
        command = self.command_of(verdict, base, by_id)
        rows = [
            {**asdict(tally), "change": tally.change.id, "label": tally.change.label, "group": tally.change.group}
            | {"command": trial.command(self.started, self.folder) if tally.saved else None}
            for trial, tally in zip((base, *trials), tallies, strict=True)
        ]
        return {
            "checkpoint": task.step,
            "collapse": exact.begun if exact is not None and not exact.saved else self.found.step,
            "seen": self.found.seen,
            "end": task.end,
            "nothing": self.found.nothing,
            "reproduced": reproduced,
            "survived_from": survived,
            "verdict": verdict.kind,
            "groups": list(verdict.groups),
            "likely": verdict.groups[0] if verdict.groups else None,
            "best": verdict.best and verdict.best.id,
            "sentence": verdict.sentence + described_origin(exact, survived, task),
            "command": command,
            "changes": rows,
            "left_out": left_out,
            "failures": self.failures,
        }

    def command_of(self, verdict: Verdict, base: Trial, trials: dict[str, Trial]) -> str:
        """What to do next."""
        if verdict.best is not None:
            return trials[verdict.best.id].command(self.started, self.folder)
        if verdict.kind == "chance":
            again = replace(base, sets=(*base.sets, f"seed={base.config.seed + 1}"))
            return replace(again, change=replace(UNCHANGED, id="again")).command(self.started, self.folder)
        older = [one.step for one in self.found.stored if one.step < base.task.step]
        if older:
            return f"scalelong why {self.started} --from {older[-1]}"
        lower = next((trial for trial in trials.values() if trial.change.id == "lr-quarter"), base)
        return lower.command(self.started, self.folder)


def described_origin(exact: Ended | None, survived: Sequence[int], task: Task) -> str:
    if exact is None or not exact.dipped:
        return " The exact replay survives, too: what made the run collapse is not in its checkpoint."
    if exact.saved:
        return " The exact replay collapses, too, and comes back by itself."
    if survived:
        return (
            f" From step {survived[-1]} the exact replay survives, from step {task.step} it does not: what is wrong "
            "came into the weights or the optimiser between them, and not by training."
        )
    return ""


def describe_end(ended: Ended) -> str:
    if ended.saved:
        return f"survived, loss {ended.loss:.4g}"
    return f"collapsed after step {ended.begun}"


def work_off(
    waiting: deque[Job],
    workers: int,
    signals: StopSignals,
    ended: Callable[[Job, End], None],
    tick: Callable[[int], None],
) -> None:
    """Make jobs in so many processes at a time; when a signal comes, all save and end."""
    running: dict[int, tuple[Job, Any]] = {}
    lost: Counter[Path] = Counter()
    deadline = float("inf")
    try:
        while waiting or running:
            if signals.received is not None and deadline == float("inf"):
                waiting.clear()
                deadline = time.monotonic() + SAVE_SECONDS
                for _, process in running.values():
                    process.terminate()
            for slot in range(workers):
                if waiting and slot not in running:
                    job = waiting.popleft()
                    running[slot] = job, jobs.submit(job, slot, jobs.threads_each(workers))
            wait([process.sentinel for _, process in running.values()], TICK)
            for slot, (job, process) in list(running.items()):
                if (end := jobs.poll(job, process)) is None:
                    continue
                del running[slot]
                lost[job.path] += 1
                cut_off = end.status in ("stopped", "lost")
                if cut_off and signals.received is None and lost[job.path] < ATTEMPTS:
                    waiting.appendleft(job)
                elif not cut_off or signals.received is None:
                    ended(job, end)
            tick(len(waiting))
            if time.monotonic() > deadline:
                return
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
