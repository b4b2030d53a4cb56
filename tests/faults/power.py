"""Power that goes at every moment of some work: what was reported as saved is there, and the work goes on from it."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from prepare_cases import tiny_job

from scalelong.data.prepare import prepare
from scalelong.runs import Run
from scalelong.runs.checkpoint import CheckpointStore

from .cases import Case, Outcome, Shared, contents, differences, sample
from .disk import WAYS, Recorder, crashes, write_tree

Report = Callable[[Any], None]
GOLDEN = 0.6180339887498949  # Its multiples, modulo 1, are spread evenly however many there are.


@dataclass(frozen=True)
class Work:
    """What is done in a folder, which `report` is told of; and what is wrong with what a power loss has left."""

    name: str
    begin: Callable[[Shared, Path], object]
    """Makes what is there before."""
    do: Callable[[Shared, Path, Report], object]
    check: Callable[[Case, Path, Sequence[Any]], str]
    """What is lost of what was reported, or not as in undisturbed work when it is done again; empty if nothing is."""


def cut_power(case: Case) -> Outcome:
    """The power goes at one moment of a recorded piece of work, and the disk loses what it may in several ways."""
    works = WORKS[:2] if case.shared.quick else WORKS
    work, turn = works[case.number % len(works)], case.number // len(works)
    recorder: Recorder = pickle.loads(
        (case.shared.make(f"power-{work.name}", record(case.shared, work)) / FILE).read_bytes()
    )
    moment = recorder.first + int(turn * GOLDEN % 1 * (len(recorder.events) - recorder.first))
    (_, disk), tried = next(crashes(recorder, [moment])), []
    for way in WAYS:
        tree = disk.after_power_loss(way, case.chance)
        if tree in tried:
            continue
        folder = write_tree(tree, case.place / f"disk-{len(tried)}")
        if lost := work.check(case, folder, disk.reported):
            return Outcome("wrong", f"{work.name}, event {moment}, {way}: {lost}")
        tried.append(tree)
    return Outcome("recovered", tries=len(tried))


FILE = "events.pickle"


def record(shared: Shared, work: Work) -> Callable[[Path], object]:
    """Do the work once in a folder, and write down what happens to its files."""

    def recorded(folder: Path) -> None:
        disk = folder / "disk"
        disk.mkdir()
        work.begin(shared, disk)
        recorder = Recorder(disk)
        with recorder.recording():
            work.do(shared, disk, recorder.report)
        (folder / FILE).write_bytes(pickle.dumps(recorder))

    return recorded


def train(variant: str) -> Work:
    """A run from its first step on."""

    def do(shared: Shared, folder: Path, report: Report) -> None:
        with saves_reported(report):
            shared.train(variant, folder / "runs" / "run")

    def check(case: Case, folder: Path, reported: Sequence[Any]) -> str:
        out, known = folder / "runs" / "run", max(reported, default=0)
        latest = Run(out).checkpoints().latest() if out.exists() else None
        if known and (latest is None or latest.step < known):
            return f"step {known} was reported as saved, and {latest} is there"
        end = case.call(lambda: case.shared.train(variant, out))
        return f"could not go on: {end}" if end.code else str(differences(out, case.shared.whole(variant)) or "")

    return Work(f"train-{variant}", lambda shared, folder: None, do, check)


def resume(variant: str) -> Work:
    """The same, of one that was killed."""
    whole = train(variant)

    def begin(shared: Shared, folder: Path) -> None:
        shutil.copytree(shared.half(variant), folder / "runs" / "run")

    return Work(f"resume-{variant}", begin, whole.do, whole.check)


@contextmanager
def saves_reported(report: Report) -> Iterator[None]:
    save = CheckpointStore.save

    def reported(self: CheckpointStore, step: int, *args: Any) -> Path:
        path = save(self, step, *args)
        report(step)
        return path

    with patch.object(CheckpointStore, "save", reported):
        yield


def check_files(case: Case, found: Path, whole: Path, again: Callable[[], object], reported: Sequence[Any]) -> str:
    """Files that were reported are there; others are made by the same command."""
    if not reported and (end := case.call(again)).code:
        return f"could not go on: {end}"
    ours, theirs = contents(found), contents(whole)
    return ", ".join(name for name in theirs if ours.get(name) != theirs[name])


def do_sample(shared: Shared, folder: Path, report: Report) -> None:
    sample(folder / "run")
    report("images")


def check_sample(case: Case, folder: Path, reported: Sequence[Any]) -> str:
    run, whole = folder / "run", case.shared.sampled() / "run"
    return check_files(case, run / "samples", whole / "samples", lambda: sample(run), reported)


def do_prepare(shared: Shared, folder: Path, report: Report) -> None:
    shared.prepared("both")
    prepare(tiny_job(shared.folder / "encoders", folder / "out"))
    report("prepared data")


def check_prepare(case: Case, folder: Path, reported: Sequence[Any]) -> str:
    whole, root = case.shared.prepared("both") / "out", case.shared.folder / "encoders"
    return check_files(case, folder / "out", whole, lambda: prepare(tiny_job(root, folder / "out")), reported)


WORKS = (
    *(train("plain"), resume("plain"), train("evaluated"), resume("gates")),
    Work(
        "sample", lambda shared, folder: shutil.copytree(shared.whole("plain"), folder / "run"), do_sample, check_sample
    ),
    Work("prepare", lambda shared, folder: None, do_prepare, check_prepare),
)
