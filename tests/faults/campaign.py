"""A campaign: cases of every fault by a seed, each in a process of its own, and one table of what came of them."""

from __future__ import annotations

import gc
import json
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

CASE_SECONDS = 240


@dataclass(frozen=True)
class Planned:
    """A fault, and how many tries it gets in a short campaign, in a sample, and in a long one."""

    name: str
    what: str
    fault: Fault
    tries: tuple[int, int, int]


PLAN = [
    Planned("kill a run", "SIGKILL of one process, random moment or file operation", kills.kill_run, (8, 60, 200)),
    Planned("kill ranks", "SIGKILL of one or both of two processes", kills.kill_ranks, (0, 6, 30)),
    Planned("kill prepare", "SIGKILL while data is prepared", kills.kill_prepare, (2, 20, 60)),
    Planned("kill sample", "SIGKILL while images are sampled", kills.kill_sample, (2, 20, 60)),
    Planned("kill comparison", "SIGKILL of a comparison, or of one of its runs", kills.kill_comparison, (0, 3, 20)),
    Planned("damage run", "damaged files of a run that is resumed", damage.damage_run, (20, 120, 1000)),
    Planned("damage finished", "damaged files of a run that is used", damage.damage_finished, (10, 60, 500)),
    Planned("damage samples", "damaged samples", damage.damage_samples, (4, 20, 150)),
    Planned("damage prepared", "damaged prepared data", damage.damage_prepared, (4, 20, 200)),
    Planned("damage comparison", "damaged files of a comparison", damage.damage_comparison, (2, 20, 200)),
    Planned("recipe", "recipes that were changed at random", recipes.mutate_recipe, (60, 400, 2600)),
    Planned("override", "overrides of any kind", recipes.override_recipe, (20, 100, 600)),
    Planned("data", "hostile data: parquet, zip, tar, images", hostile.hostile_data, (6, 40, 300)),
    Planned("model", "hostile models: checkpoints, encoders, networks", hostile.hostile_model, (6, 40, 300)),
    Planned("disk", "a full disk", interruptions.fill_disk, (3, 20, 80)),
    Planned("signal", "SIGINT and SIGTERM at file operations", interruptions.signal_anywhere, (3, 20, 80)),
    Planned("signal work", "… in evaluation, sampling, checkpoints", interruptions.signal_at_work, (2, 20, 80)),
    Planned("signal start", "… while a process starts", interruptions.signal_at_start, (0, 3, 25)),
    Planned("nan", "NaN in a batch, or in all", interruptions.poison, (2, 10, 50)),
    Planned("power", "power that goes, and unsynced writes lost", power.cut_power, (8, 60, 600)),
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

    def add(self, name: str, outcome: Outcome) -> None:
        self.cases += 1
        if outcome.kind == "missed":
            return
        self.tries += outcome.tries
        setattr(self, outcome.kind, getattr(self, outcome.kind) + outcome.tries)
        if outcome.kind == "wrong":
            self.found.append(f"{name}: {outcome.detail}")


@dataclass
class Running:
    name: str
    row: Row
    process: int
    place: Path
    deadline: float


class Campaign:
    """Runs cases, `jobs` of them at a time; `file` keeps what came of them, so that a stopped campaign goes on."""

    def __init__(self, seed: int, size: int, folder: Path, *, jobs: int = 1, file: Path | None = None) -> None:
        self.seed, self.size, self.folder, self.jobs, self.file = seed, size, folder, jobs, file
        self.rows = {planned.name: Row() for planned in PLAN}
        if file is not None and file.exists():
            before = json.loads(file.read_text())
            if (before["seed"], before["size"]) == (seed, size):
                self.rows |= {name: Row(**row) for name, row in before["rows"].items() if name in self.rows}
        self.running: list[Running] = []
        gc.collect()
        gc.freeze()  # `scale_skips` looks for what refers to a model among all that is not frozen.

    def run(self, only: Sequence[str] = (), until: float = float("inf")) -> None:
        """All cases that are left, or as many as there is time for."""
        for planned in PLAN:
            if only and planned.name not in only:
                continue
            row, number = self.rows[planned.name], self.rows[planned.name].cases
            while row.tries < planned.tries[self.size] and time.monotonic() < until:
                # Not more than may be needed: what is begun is counted.
                if len(self.running) < self.jobs:
                    self.start(planned, number, row)
                    number += 1
                self.collect()
            while self.running:
                self.collect()
            self.save()

    def start(self, planned: Planned, number: int, row: Row) -> None:
        name = f"{self.seed}/{planned.name}/{number}"
        place = self.folder / f"{planned.name.replace(' ', '-')}-{number}"
        process = fork_case(planned, name, place, Shared(self.folder / "shared"))
        self.running.append(Running(name, row, process, place, time.monotonic() + CASE_SECONDS))

    def collect(self) -> None:
        """Take the results of cases that have ended."""
        time.sleep(0.005)
        for one in list(self.running):
            if time.monotonic() < one.deadline and not os.waitpid(one.process, os.WNOHANG)[0]:
                continue
            with suppress(ProcessLookupError):
                os.killpg(one.process, signal.SIGKILL)  # Whatever the case has left running.
            self.running.remove(one)
            one.row.add(one.name, read_outcome(one.place))
            shutil.rmtree(one.place, ignore_errors=True)
            if one.row.cases % 20 == 0:
                self.save()

    def save(self) -> None:
        if self.file is not None:
            content = {"seed": self.seed, "size": self.size, "rows": {k: asdict(v) for k, v in self.rows.items()}}
            temporary = self.file.with_suffix(".tmp")
            temporary.write_text(json.dumps(content, indent=1) + "\n")
            temporary.replace(self.file)


def fork_case(planned: Planned, name: str, place: Path, shared: Shared) -> int:
    """Try a case in a process of its own, with all processes that it starts in one group."""
    place.mkdir()
    process = os.fork()
    if process:
        with suppress(OSError):
            os.setpgid(process, process)
        return process
    try:
        os.setpgid(0, 0)
        os.chdir(place)
        outcome = try_case(planned, name, place, shared)
        (place / "outcome.json").write_text(json.dumps(asdict(outcome)))
    finally:
        os._exit(0)  # What the campaign does in the end is not for its children.


def try_case(planned: Planned, name: str, place: Path, shared: Shared) -> Outcome:
    try:
        return planned.fault(Case(int(name.split("/")[-1]), random.Random(name), place, shared))
    except BaseException:
        return Outcome("wrong", f"the case itself failed: {traceback.format_exc()}")


def read_outcome(place: Path) -> Outcome:
    try:
        return Outcome(**json.loads((place / "outcome.json").read_text()))
    except (OSError, ValueError):
        return Outcome("wrong", f"hung for {CASE_SECONDS} seconds, or died")


def replay(name: str, folder: Path) -> Outcome:
    """Try one case once more; what it leaves stays in the folder."""
    fault = name.split("/")[1]
    planned = next(planned for planned in PLAN if planned.name == fault)
    os.chdir(folder)
    (folder / "case").mkdir()
    return try_case(planned, name, folder / "case", Shared(folder / "shared"))


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
