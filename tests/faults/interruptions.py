"""What a run meets on its way: a full disk, signals at the worst moments, and numbers that are none."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Timer
from typing import Any

from run_cases import final_tensors

from scalelong.data import Batch
from scalelong.evaluation import evaluate as evaluating
from scalelong.runs import read_metrics
from scalelong.runs.checkpoint import CheckpointStore
from scalelong.training import samples
from scalelong.training.loss import DiffusionLoss, NoisyBatch

from .cases import Case, Outcome, as_undisturbed, pick, wrong
from .children import End, command, sets
from .operations import At, find_no_room, kill_self, watched

PLACES = (
    *((evaluating, "figures_of"), (evaluating, "sampled_features")),
    *((samples, "sample_network"), (CheckpointStore, "save"), (CheckpointStore, "_publish")),
)
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


def training(case: Case, variant: str) -> Callable[[], object]:
    return command("train", "digits", *sets(case.shared.overrides(variant)), "--out", case.place / "run")


def resumed(case: Case, variant: str) -> Outcome:
    """The same command once more, undisturbed."""
    end = case.call(training(case, variant))
    if end.code:
        return wrong(f"could not go on: {end}")
    return as_undisturbed(case.place / "run", case.shared.whole(variant))


def fill_disk(case: Case) -> Outcome:
    """A write that finds no room, once or from then on, or files that may not grow any more; later there is room."""
    variant = pick(case, plain=3, evaluated=1)
    train, number = training(case, variant), case.chance.randint(1, case.shared.operations(variant))
    lasting, by_size = case.chance.random() < 0.5, case.chance.random() < 0.3
    limit = case.chance.choice((2000, 20_000, 60_000))

    def full() -> None:
        if by_size:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            train()
        with watched(At(number, find_no_room, lasting=lasting)):
            train()

    end = case.call(full)
    if end.traced or end.code not in (0, 2) or (end.code == 2 and not end.refused):
        return wrong(f"a full disk: {end}")
    return resumed(case, variant)


def signal_anywhere(case: Case) -> Outcome:
    """SIGINT or SIGTERM just before an operation on a file: checkpoints, grids, the log, the end."""
    variant = pick(case, plain=3, evaluated=1)
    number, kind = case.chance.randint(1, case.shared.operations(variant)), case.chance.choice(list(STOPPED))

    def work() -> None:
        with watched(At(number, lambda: os.kill(os.getpid(), kind))):
            training(case, variant)()

    return signalled(case, variant, kind, case.call(work))


def signal_at_work(case: Case) -> Outcome:
    """A signal while samples are drawn or evaluated, or while a checkpoint is written, or a moment later."""
    owner, name = case.chance.choice(PLACES)
    number, kind = case.chance.randint(1, 4), case.chance.choice(list(STOPPED))
    delay = case.chance.choice((0.0, case.chance.uniform(0, 0.05)))

    def work() -> None:
        later = Timer(delay, os.kill, (os.getpid(), kind))
        at = At(number, later.start if delay else lambda: os.kill(os.getpid(), kind))
        original = getattr(owner, name)

        def disturbed(*args: Any, **options: Any) -> Any:
            at(name, args)
            return original(*args, **options)

        setattr(owner, name, disturbed)
        training(case, "evaluated")()

    return signalled(case, "evaluated", kind, case.call(work))


def signalled(case: Case, variant: str, kind: signal.Signals, end: End) -> Outcome:
    """A run that a signal reached: it says nothing but how to go on, and does go on."""
    # Before its first step and after its last a run has nothing to save, and SIGTERM is the system's.
    if end.traced or end.code not in (0, STOPPED[kind], *([-kind] if kind == signal.SIGTERM else [])):
        return wrong(f"{kind.name}: {end}")
    return resumed(case, variant)


def signal_at_start(case: Case) -> Outcome:
    """A signal in the first seconds of a real process, imports included."""
    kind, delay = case.chance.choice(list(STOPPED)), case.chance.uniform(0.02, 1) ** 2 * 8
    arguments = ["train", "digits", *sets(case.shared.overrides("plain")), "--out", str(case.place / "run")]
    program = [sys.executable, "-m", "scalelong", *arguments]
    with open(case.place / "out", "w+") as out, open(case.place / "err", "w+") as err:
        process = subprocess.Popen(program, stdout=out, stderr=err)
        time.sleep(delay)
        process.send_signal(kind)
        code = process.wait(100)
        out.seek(0), err.seek(0)
        end = End(code, out.read(), err.read())
    if end.traced and "/scalelong/" not in end.err:
        return Outcome("missed")  # Python itself was still starting.
    if end.code == -kind and "finished: " in end.out + end.err:
        return Outcome("missed")  # All was over, and Python ending.
    return signalled(case, "plain", kind, end)


def poison(case: Case) -> Outcome:
    """NaN in the noise of a batch, or of all from there on; and a kill, which must not change what comes of it."""
    first, lasting = case.chance.randint(0, 7), case.chance.random() < 0.3
    operation = case.chance.randint(1, case.shared.operations("plain"))

    def train() -> None:
        make_nan(first, lasting=lasting)
        training(case, "plain")()

    def killed() -> None:
        with watched(At(operation, kill_self)):
            train()

    name = f"poisoned-{first}-{lasting}"
    whole = case.shared.make(name, lambda folder: poisoned_run(replace(case, place=folder), first, lasting))
    case.call(killed)
    end = case.call(train)
    refused = end.refused and lasting
    if end.traced or not (refused or end.code == 0):
        return wrong(end)
    if not all(tensor.isfinite().all() for tensor in final_tensors(case.place / "run").values()):
        return wrong("NaN reached a checkpoint")
    if not any("event" in line for line in read_metrics(case.place / "run" / "metrics.jsonl")):
        return wrong("nothing was logged")
    return Outcome("refused") if refused else as_undisturbed(case.place / "run", whole / "run")


def poisoned_run(case: Case, first: int, lasting: bool) -> None:
    make_nan(first, lasting=lasting)
    with suppress(SystemExit):
        training(case, "plain")()


def make_nan(first: int, *, lasting: bool) -> None:
    draw = DiffusionLoss.sample_noise

    def noise(self: DiffusionLoss, batch: Batch) -> NoisyBatch:
        noised = draw(self, batch)
        broken = batch.step >= first if lasting else batch.step == first
        return replace(noised, noise=noised.noise * float("nan")) if broken else noised

    DiffusionLoss.sample_noise = noise
