"""What a fault is tried on: small runs, and what they come to when nothing disturbs them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from checkpoint_cases import contents
from comparison_cases import TINY as COMPARED
from evaluation_cases import script_file
from filelock import FileLock
from prepare_cases import save_all, tiny_job
from run_cases import TINY, Crash, CrashAt, final_tensors, lasting_metrics, run_tiny

from scalelong.compare import jobs
from scalelong.data.prepare import prepare
from scalelong.sampling import sample_run
from scalelong.training import Display
from scalelong.training.logger import Silent

from .children import Child, End, call, command, sets
from .operations import counted

Kind = Literal["refused", "recovered", "wrong", "missed"]


@dataclass(frozen=True)
class Outcome:
    """What came of a case: `missed` if the fault did not come to pass, as when a run ends before the signal comes."""

    kind: Kind
    detail: str = ""
    tries: int = 1
    """How many faults there were in the case."""


RECOVERED, MISSED = Outcome("recovered"), Outcome("missed")


def wrong(detail: object) -> Outcome:
    return Outcome("wrong", str(detail))


@dataclass(frozen=True)
class Case:
    """A case of a fault: what it draws, an empty folder of its own, and what all cases share and none changes."""

    number: int
    chance: random.Random
    place: Path
    shared: Shared

    def start(self, function: Callable[[], object], *, seconds: float = 120) -> Child:
        return Child(function, self.said(), seconds=seconds)

    def call(self, function: Callable[[], object], *, seconds: float = 120) -> End:
        return call(function, self.said(), seconds=seconds)

    def said(self) -> Path:
        """Where the next process writes what it says."""
        folder = self.place / "said"
        folder.mkdir(exist_ok=True)
        return folder / f"{len(list(folder.iterdir())):04d}"

    def copy(self, source: Path, name: str = "run") -> Path:
        return Path(shutil.copytree(source, self.place / name))


Fault = Callable[[Case], Outcome | list[Outcome]]

SHORT = ("training.validate_every=4", "training.sample_every=4", "sampling.sampler=ddim", "sampling.steps=2")
EVALUATED = (
    *("data.validation_count=1500", "evaluation.images=40", "evaluation.weights=both", "evaluation.every=4"),
    "evaluation.network=torchscript:{shared}/net.pt",
)
VARIANTS = {
    "plain": SHORT,
    "gates": (*SHORT, "scaling.method=ls", "training.monitor_every=2", "training.grad_accumulation=2"),
    "evaluated": (*SHORT, *EVALUATED),
}


class Shared:
    """Runs that nothing disturbed, made once for all cases."""

    def __init__(self, folder: Path, *, quick: bool = False) -> None:
        self.folder, self.quick = folder, quick
        folder.mkdir(parents=True, exist_ok=True)

    def overrides(self, variant: str) -> list[str]:
        if variant == "evaluated" and not (network := self.folder / "net.pt").exists():
            script_file(network)
        return [*TINY, *(override.format(shared=self.folder) for override in VARIANTS[variant])]

    def make(self, name: str, function: Callable[[Path], object]) -> Path:
        """A folder that a function fills, in a process of its own, unless it is there."""
        folder = self.folder / name
        if folder.exists():
            return folder
        partial = self.folder / f".making-{name}"
        with FileLock(self.folder / f".{name}.lock"):
            if not folder.exists():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                end = call(lambda: function(partial), self.folder / f".said-{name}")
                assert end.code == 0, f"{name} could not be made: {end}"
                partial.rename(folder)
        return folder

    def whole(self, variant: str) -> Path:
        """A run that came to its end."""
        return self.make(f"{variant}-whole", lambda folder: self.train(variant, folder))

    def half(self, variant: str) -> Path:
        """The same run, ended without a word after its checkpoint of step 6."""
        return self.make(f"{variant}-half", lambda folder: self.crash(variant, folder))

    def operations(self, variant: str) -> int:
        """How many operations on files the whole run takes."""
        return self.number(f"{variant}-operations", lambda folder: counted(lambda: self.train(variant, folder / "run")))

    def sampled(self) -> Path:
        """A finished run with a folder of images."""
        return self.make("sampled", lambda folder: sample(Path(shutil.copytree(self.whole("plain"), folder / "run"))))

    def prepared(self, what: str) -> Path:
        """Encoded captions and images, or images alone."""
        root = self.make("encoders", save_all)
        return self.make(f"prepared-{what}", lambda folder: prepare(tiny_job(root, folder / "out", what=what)))

    def compared(self) -> Path:
        """A finished comparison."""
        return self.make("compared", lambda folder: compare(folder / "out"))

    def number(self, name: str, count: Callable[[Path], int]) -> int:
        """A number that is found once, by doing something in a folder."""
        file = "number.json"
        folder = self.make(name, lambda folder: (folder / file).write_text(json.dumps(count(folder))))
        return json.loads((folder / file).read_text())

    def train(self, variant: str, out: Path, display: Display | None = None) -> None:
        run_tiny(out, *self.overrides(variant), display=display or Silent())

    def crash(self, variant: str, out: Path) -> None:
        with suppress(Crash):
            self.train(variant, out, CrashAt(7))


def sample(run: Path) -> None:
    sample_run(run, 20, batch=8)


def compare(out: Path) -> None:
    """A comparison whose jobs are forked from this process, which has imported all that they need."""
    jobs.METHOD = "fork"
    arguments = ("compare", "digits", "--methods", "none,cs", "--seeds", 2, "--workers", 1, *sets(COMPARED))
    command(*arguments, "--out", out)()


def differences(found: Path, whole: Path) -> dict[str, str]:
    """What of a run is not, to the bit, as in one that nothing disturbed, by the part of it."""
    ours, theirs = final_tensors(found), final_tensors(whole)
    different = {}
    if ours.keys() != theirs.keys() or not all(tensor.equal(ours[name]) for name, tensor in theirs.items()):
        different["checkpoints"] = "other weights"
    if log_of(found) != log_of(whole):
        different["metrics.jsonl"] = "other lines"
    ours, theirs = contents(found / "samples"), contents(whole / "samples")
    different |= {name: "another picture" for name in theirs if ours.get(name) != theirs[name]}
    if (whole / "evaluation.json").exists() and evaluations(found) != evaluations(whole):
        different["evaluation.json"] = "other figures"
    return different


def log_of(folder: Path) -> Any:
    try:
        return lasting_metrics(folder)
    except ValueError as error:
        return f"cannot be read: {error}"


def evaluations(folder: Path) -> Any:
    try:
        return json.loads((folder / "evaluation.json").read_text())
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"


def as_undisturbed(found: Path, whole: Path, *, tries: int = 1) -> Outcome:
    said = differences(found, whole)
    return Outcome("wrong" if said else "recovered", str(said or ""), tries)


def pick(case: Case, **weights: int) -> str:
    """One of several at random; the first in a quick campaign, which makes what cases share for that one only."""
    chosen = case.chance.choices(list(weights), list(weights.values()))[0]
    return next(iter(weights)) if case.shared.quick else chosen
