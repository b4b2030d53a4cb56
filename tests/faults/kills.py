"""SIGKILL, at a random moment or just before a random operation on a file; then the same command again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from prepare_cases import contents as prepared_files
from prepare_cases import tiny_job
from run_cases import free_port

from scalelong.data.prepare import prepare
from scalelong.training import parallel

from .cases import Case, Outcome, as_undisturbed, compare, pick, sample, wrong
from .children import Child, command, sets
from .damage import results_differ
from .operations import At, kill_self, watched

MOST_KILLS = 3


def kill_often(case: Case, work: Callable[[], object], *, operations: int, seconds: float) -> int:
    """Start some work up to three times, and kill it each time; how many kills came before its end."""
    hits = 0
    for _ in range(case.chance.randint(1, MOST_KILLS)):
        if case.chance.random() < 0.5:
            hits += case.call(killed_at(work, case.chance.randint(1, operations))).code == -signal.SIGKILL
        else:
            child = case.start(work)
            time.sleep(case.chance.uniform(0, seconds))
            hits += child.kill()
    return hits


def killed_at(work: Callable[[], object], operation: int) -> Callable[[], object]:
    def killed() -> None:
        with watched(At(operation, kill_self)):
            work()

    return killed


def then_finish(case: Case, work: Callable[[], object], check: Callable[[int], Outcome], hits: int) -> Outcome:
    """Let the work come to its end, and see what it came to."""
    if not hits:
        return Outcome("missed")
    end = case.call(work)
    return check(hits) if end.code == 0 else wrong(f"could not go on: {end}")


def kill_run(case: Case) -> Outcome:
    """One process that trains, draws grids and evaluates."""
    variant = pick(case, plain=3, gates=2, evaluated=1)
    out, shared = case.place / "run", case.shared

    def work() -> None:
        shared.train(variant, out)

    hits = kill_often(case, work, operations=shared.operations(variant), seconds=0.6)
    return then_finish(case, work, lambda tries: as_undisturbed(out, shared.whole(variant), tries=tries), hits)


def kill_ranks(case: Case) -> Outcome:
    """One or both of two processes; the one that is left must end by itself."""
    out, hits = case.place / "run", 0
    for _ in range(case.chance.randint(1, 2)):
        children = start_ranks(case, out)
        time.sleep(case.chance.uniform(0.1, 1.5))
        targets = case.chance.choice(([0], [1], [0, 1]))
        hits += any([children[rank].send(signal.SIGKILL) for rank in targets])
        time.sleep(case.chance.uniform(0, 1))
        for child in children:
            child.send(signal.SIGKILL)  # As a launcher does, if the one that is left has not ended by itself.
            if (end := child.wait()).traced:
                return wrong(f"left alone: {end}")
    if not hits:
        return Outcome("missed")
    ends = [child.wait() for child in start_ranks(case, out)]
    if any(end.code for end in ends):
        return wrong(f"could not go on: {ends[0]} {ends[1]}")
    return as_undisturbed(out, case.shared.make("ranks-whole", lambda folder: whole_of_ranks(case, folder)), tries=hits)


def whole_of_ranks(case: Case, out: Path) -> None:
    children = start_ranks(replace(case, place=out), out / "run")
    assert not any(child.wait().code for child in children)
    for path in (out / "run").iterdir():
        path.rename(out / path.name)


def start_ranks(case: Case, out: Path) -> Sequence[Child]:
    port = free_port()
    return [case.start(lambda rank=rank: train_rank(case, out, rank, port), seconds=60) for rank in range(2)]


def train_rank(case: Case, out: Path, rank: int, port: int) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    parallel.LEFT_ALONE_SECONDS = 0.1
    command("train", "digits", *sets(case.shared.overrides("plain")), "--out", out)()


def kill_prepare(case: Case) -> Outcome:
    """The job that encodes captions and images once, by one process or two."""
    what, shared = case.chance.choice(("both", "images")), case.shared
    whole, root, out = shared.prepared(what), shared.folder / "encoders", case.place / "prepared"

    def work() -> None:
        prepare(tiny_job(root, out, what=what))

    hits = kill_often(case, work, operations=40, seconds=0.4)
    return then_finish(case, work, lambda tries: same_files(out, whole / "out", tries), hits)


def kill_sample(case: Case) -> Outcome:
    """Images of a trained run, in blocks."""
    run, shared = case.shared.whole("plain"), case.shared
    whole, out = shared.sampled(), case.copy(run)
    hits = kill_often(case, lambda: sample(out), operations=60, seconds=0.5)
    check = lambda tries: same_files(sampled(out), sampled(whole / "run"), tries)  # noqa: E731
    return then_finish(case, lambda: sample(out), check, hits)


def sampled(run: Path) -> Path:
    return next(path for path in (run / "samples").iterdir() if path.is_dir())


def kill_comparison(case: Case) -> Outcome:
    """A comparison, or the process of one of its runs."""
    out, hits = case.place / "out", 0
    for _ in range(case.chance.randint(1, 2)):
        child = case.start(lambda: compare(out))
        time.sleep(case.chance.uniform(0, 5))
        if case.chance.random() < 0.3 and child.is_running and (jobs := children_of(child.process)):
            with suppress(ProcessLookupError):
                os.kill(case.chance.choice(jobs), signal.SIGKILL)
            hits += 1
            end = child.wait()
            if end.code:
                return wrong(f"one job was killed: {end}")
        else:
            hits += child.kill()
    whole = case.shared.compared() / "out"

    def check(tries: int) -> Outcome:
        different = results_differ(out, whole)
        return Outcome("wrong" if different else "recovered", str(different or ""), tries)

    return then_finish(case, lambda: compare(out), check, hits)


def children_of(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children")
    return [int(number) for number in found.read_text().split()] if found.exists() else []


def same_files(found: Path, expected: Path, tries: int) -> Outcome:
    ours, theirs = prepared_files(found), prepared_files(expected)
    if ours == theirs:
        return Outcome("recovered", tries=tries)
    different = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return wrong(f"other files: {', '.join(different[:5])}")
