"""A campaign: cases of every fault by a seed, each in a process of its own, and one table of what came of them."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import torch

from . import damage, hostile, interruptions, kills, power, recipes
from .cases import Case, Fault, Outcome, Shared

SIZES = ("short", "sample", "long")
CASE_SECONDS = 240
BATCH = 8
OUTCOMES = "outcomes.json"


@dataclass(frozen=True)
class Planned:
    """A fault, and how many tries it gets in a short campaign, in a sample, and in a long one."""

    name: str
    what: str
    fault: Fault
    tries: tuple[int, int, int]
    each: int = 1
    """About how many tries are in a case."""


PLAN = [
    Planned("kill run", "SIGKILL of one process, random moment or file operation", kills.kill_run, (6, 50, 170)),
    Planned("kill ranks", "SIGKILL of one or both of two processes", kills.kill_ranks, (0, 6, 20)),
    Planned("kill prepare", "SIGKILL while data is prepared", kills.kill_prepare, (1, 15, 50)),
    Planned("kill sample", "SIGKILL while images are sampled", kills.kill_sample, (2, 15, 50)),
    Planned("kill comparison", "SIGKILL of a comparison, or of one of its runs", kills.kill_comparison, (0, 3, 12)),
    Planned("damage run", "damaged files of a run that is resumed", damage.damage_run, (12, 100, 500)),
    Planned("damage finished", "damaged files of a run that is used", damage.damage_finished, (8, 60, 1000)),
    Planned("damage samples", "damaged samples", damage.damage_samples, (4, 20, 150)),
    Planned("damage prepared", "damaged prepared data", damage.damage_prepared, (2, 20, 200)),
    Planned("damage comparison", "damaged files of a comparison", damage.damage_comparison, (0, 20, 150)),
    Planned("recipe", "recipes that were changed at random", recipes.mutate_recipes, (40, 600, 2600), recipes.TOGETHER),
    Planned("override", "overrides of any kind", recipes.override_recipes, (20, 100, 500), recipes.TOGETHER),
    Planned("data", "hostile data: parquet, zip, tar, images", hostile.hostile_data, (4, 30, 200)),
    Planned("model", "hostile models: checkpoints, encoders, networks", hostile.hostile_model, (3, 30, 200)),
    Planned("disk", "a full disk", interruptions.fill_disk, (2, 15, 50)),
    Planned("signal", "SIGINT and SIGTERM at file operations", interruptions.signal_anywhere, (2, 15, 50)),
    Planned("signal work", "… in evaluation, sampling, checkpoints", interruptions.signal_at_work, (0, 10, 40)),
    Planned("signal start", "… while a process starts", interruptions.signal_at_start, (0, 3, 10)),
    Planned("nan", "NaN in a batch, or in all", interruptions.poison, (1, 8, 30)),
    Planned("power", "power that goes, and unsynced writes lost", power.cut_power, (6, 60, 300)),
]


@dataclass
class Row:
    """What came of a fault up to now."""

    cases: int = 0
    tries: int = 0
    refused: int = 0
    recovered: int = 0
    wrong: int = 0
    found: list[str] = field(default_factory=list)
    """What was wrong, each with the name of its case."""

    def add(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.cases += 1
        for outcome in outcomes:
            if outcome.kind == "missed":
                continue
            self.tries += outcome.tries
            setattr(self, outcome.kind, getattr(self, outcome.kind) + outcome.tries)
            if outcome.kind == "wrong":
                self.found.append(f"{name}: {outcome.detail}")


@dataclass
class Batch:
    """Cases that one process tries, one after the other."""

    names: Sequence[str]
    row: Row
    process: int
    place: Path
    deadline: float


class Campaign:
    """Tries cases in `jobs` processes at a time; `file` keeps what came of them, so that a stopped campaign goes on."""

    def __init__(self, seed: int, size: int, folder: Path, *, jobs: int = 1, file: Path | None = None) -> None:
        self.seed, self.size, self.folder, self.jobs, self.file = seed, size, folder, jobs, file
        self.rows = {planned.name: Row() for planned in PLAN}
        if file is not None and file.exists():
            before = json.loads(file.read_text())
            if (before["seed"], before["size"]) == (seed, SIZES[size]):
                self.rows |= {name: Row(**row) for name, row in before["rows"].items() if name in self.rows}
        self.running: list[Batch] = []
        gc.collect()
        gc.freeze()  # `scale_skips` looks for what refers to a model among all that is not frozen.

    def run(self, only: Sequence[str] = (), until: float = math.inf) -> None:
        """All cases that are left, or as many as there is time for."""
        for planned in PLAN:
            if only and planned.name not in only:
                continue
            row, wanted = self.rows[planned.name], planned.tries[self.size]
            number = row.cases
            while (row.tries < wanted and time.monotonic() < until) or self.running:
                expected = row.tries + planned.each * sum(len(batch.names) for batch in self.running)
                if len(self.running) < self.jobs and expected < wanted and time.monotonic() < until:
                    count = min(BATCH, max(1, (wanted - expected) // planned.each))
                    self.start(planned, range(number, number + count), row)
                    number += count
                self.collect()
            self.save()

    def start(self, planned: Planned, numbers: range, row: Row) -> None:
        names = [f"{self.seed}/{planned.name}/{number}" for number in numbers]
        place = self.folder / f"{planned.name.replace(' ', '-')}-{numbers[0]}"
        process = fork_batch(planned, names, place, Shared(self.folder / "shared", quick=not self.size))
        self.running.append(Batch(names, row, process, place, time.monotonic() + CASE_SECONDS * len(numbers)))

    def collect(self) -> None:
        """Take the results of batches that have ended."""
        time.sleep(0.005)
        for batch in list(self.running):
            if time.monotonic() < batch.deadline and not os.waitpid(batch.process, os.WNOHANG)[0]:
                continue
            with suppress(ProcessLookupError):
                os.killpg(batch.process, signal.SIGKILL)  # Whatever it has left running.
            self.running.remove(batch)
            for name in batch.names:
                batch.row.add(name, read_outcomes(batch.place / name.rpartition("/")[2]))
            shutil.rmtree(batch.place, ignore_errors=True)
            self.save()

    def save(self) -> None:
        if self.file is not None:
            rows = {name: asdict(row) for name, row in self.rows.items()}
            content = {"seed": self.seed, "size": SIZES[self.size], "rows": rows}
            temporary = self.file.with_suffix(".tmp")
            temporary.write_text(json.dumps(content, indent=1) + "\n")
            temporary.replace(self.file)


def fork_batch(planned: Planned, names: Sequence[str], place: Path, shared: Shared) -> int:
    """Try some cases in a process of their own, with all processes that it starts in one group."""
    place.mkdir()
    process = os.fork()
    if process:
        with suppress(OSError):
            os.setpgid(process, process)
        return process
    try:
        os.setpgid(0, 0)
        for name in names:
            folder = place / name.rpartition("/")[2]
            folder.mkdir()
            os.chdir(folder)
            outcomes = try_case(planned, name, folder, shared)
            for left in folder.iterdir():
                shutil.rmtree(left, ignore_errors=True)
            (folder / OUTCOMES).write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    finally:
        os._exit(0)  # What the campaign does in the end is not for its children.


def try_case(planned: Planned, name: str, place: Path, shared: Shared) -> Sequence[Outcome]:
    try:
        case = Case(int(name.rpartition("/")[2]), random.Random(name), place, shared)
        found = planned.fault(case)
    except BaseException:
        return [Outcome("wrong", f"the case itself failed: {traceback.format_exc()}")]
    return [found] if isinstance(found, Outcome) else found


def read_outcomes(place: Path) -> Sequence[Outcome]:
    try:
        return [Outcome(**outcome) for outcome in json.loads((place / OUTCOMES).read_text())]
    except (OSError, ValueError):
        return [Outcome("wrong", "hung, or died")]


def replay(name: str, folder: Path, *, quick: bool = False) -> Sequence[Outcome]:
    """Try one case once more; what it leaves stays in the folder."""
    fault = name.split("/")[1]
    planned = next(planned for planned in PLAN if planned.name == fault)
    os.chdir(folder)
    (folder / "case").mkdir()
    return try_case(planned, name, folder / "case", Shared(folder / "shared", quick=quick))


def table(rows: Mapping[str, Row]) -> Iterator[str]:
    """Markdown, so that it goes into the documentation as it is."""
    yield "| fault | tries | refused | recovered | wrong |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    numbers = [(row.tries, row.refused, row.recovered, row.wrong) for row in rows.values()]
    for planned, row in zip(PLAN, numbers, strict=True):
        yield f"| {planned.what} | " + " | ".join(f"{number:,}" for number in row) + " |"
    yield "| **all** | " + " | ".join(f"**{sum(column):,}**" for column in zip(*numbers, strict=True)) + " |"


def prepare_process() -> None:
    """What all children share."""
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    for module in ("datasets", "diffusers", "pyarrow.parquet", "sklearn.datasets", "torch._dynamo", "torchmetrics"):
        import_module(module)
