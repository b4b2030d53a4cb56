"""One replay: a run that begins at a checkpoint of another one, on the same batches, with one thing changed."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..data import Batch
from ..data.batches import Batches
from ..guard.losses import LossWatch, TrainingDiverged
from ..runs import Checkpoint, CheckpointStore, Run, find_resume_point, read_metrics
from ..runs.checkpoint import verify
from ..skips.hooks import NAME
from ..training.clip import START, AdaptiveClip
from ..training.logger import Silent
from ..training.loop import Trainer
from ..training.parallel import Parallel
from ..training.state import TrainState, moments_of
from ..utils.atomic import Damaged, read_json, write_signed
from .causes import Judge

FILE = "replay.json"
STOPPED = 143
FAR = 1_000_003
"""Other batches are those of so many steps later: far beyond what the run has seen."""


@dataclass(frozen=True)
class Task:
    """What a replay is told besides its recipe. Steps are those of the run that is replayed."""

    checkpoint: Path
    step: int
    """Of the checkpoint."""
    collapse: int
    end: int
    watch: Mapping[str, Any]
    """What was known of the losses at the checkpoint: a `LossWatch`."""
    limit: float = math.inf
    """What a run must come down to, if it had not before."""
    draw: int = 0
    """Which times and noise: 0 = those of the run."""
    order: bool = False
    """Whether the batches are other ones."""
    leave_out: tuple[int, ...] = ()
    """Steps that get another batch."""
    scaled: bool = False
    """Whether the skips are scaled in another way."""
    modules: tuple[str, ...] = ()
    """Paths of modules that are put back."""
    earlier: tuple[Path, str] | None = None
    """The checkpoint, and the group in it, with their earlier weights."""


@dataclass(frozen=True)
class Ended:
    """How a replay ended; `begun` is the step before the first window that was not healthy any more."""

    saved: bool
    step: int
    loss: float | None
    begun: int | None
    message: str = ""
    dipped: bool = False
    """Whether it was collapsed for a while, however it ended."""


def run_replay(task: Task, folder: Path, config: Config) -> None:
    """The job of a process: make the replay, or go on with it, and write down how it ended."""
    watch = LossWatch()
    watch.load_state_dict(task.watch)
    listener, message = Listener(folder, task, Judge(watch, task.collapse - task.step, task.limit)), ""
    if not Run(folder).checkpoints().steps() and folder.exists():
        shutil.rmtree(folder)  # It had ended, and how is not known any more.
    begun = Run(folder).exists
    point = find_resume_point(Run(folder), config, "auto" if begun else task.checkpoint)
    if point.step < task.end:
        trainer = Replay(task, config, Run(folder), point, Parallel.open(config.training), listener)
        try:
            if trainer.train().signal is not None and not listener.ends:
                sys.exit(STOPPED)
        except TrainingDiverged as error:
            message = str(error)
    else:
        listener.start(task.end, task.end)
    judge = listener.judge
    saved, step = judge.saved and not message, task.step + len(judge.losses)
    begun_at = None if saved else task.step + (judge.begun or 0)
    dipped = "collapsed" in judge.states or not saved
    ended = Ended(saved, step, judge.loss if saved else None, begun_at, message, dipped)
    write_signed(folder / FILE, asdict(ended))
    if not saved or task.draw:
        for step in Run(folder).checkpoints().steps():  # They take room, and nobody goes on from them.
            CheckpointStore(folder / "checkpoints").discard_after(step - 1)


class Listener(Silent):
    """Judges a replay while it trains; ends it where it is lost, or has come to its end."""

    def __init__(self, folder: Path, task: Task, judge: Judge) -> None:
        self.folder, self.task, self.judge, self.ends = folder, task, judge, False

    def start(self, step: int, steps: int) -> None:
        """A replay that was stopped goes on with the losses that it had."""
        for loss in losses_of(self.folder, self.task.step, step):
            self.judge.add(loss)

    def step(self, step: int, loss: float) -> None:
        self.ends = step >= self.task.end
        if self.judge.add(loss):
            raise TrainingDiverged(f"the loss stayed at {self.judge.loss:.4g} from step {self.task.collapse} on")


class Replay(Trainer):
    """A trainer whose batches, noise or first weights may be others than its recipe says."""

    def __init__(self, task: Task, *parts: Any) -> None:
        super().__init__(*parts)
        self.task = task
        self.batches: Any = Rearranged(self.batches, task)
        # Each draw has times and noise of its own; the images stay.
        self.loss = replace(self.loss, seed=self.config.seed + FAR * task.draw)

    def load(self, checkpoint: Checkpoint) -> None:
        fresh = not self.start.same_run
        super().load(Fitted.of(checkpoint, self.state, self.task.scaled) if fresh else checkpoint)
        self.batches.offset = self.state.batch_offset
        if not fresh:
            return
        self.state.loss_sum, self.state.loss_count = 0.0, 0
        if self.state.clip is not None and self.state.clip.steps < START:
            begin_clip(self.state.clip, self.state, self.config.optim.betas[1])
        if self.task.earlier is not None:
            path, group = self.task.earlier
            put_back(self.network.state_dict(), verify(path).tensors(group), self.task.modules)
            put_back(self.state.ema.state_dict(), verify(path).tensors("ema"), self.task.modules)


class Rearranged:
    """The batches of a run, with others in the place of those that are left out, or all of them others."""

    def __init__(self, batches: Batches, task: Task) -> None:
        self.batches, self.own, self.offset = batches, batches.own, 0
        self.far = FAR * (task.draw + 1)
        self.order, self.leave_out = task.order, frozenset(task.leave_out)

    def at(self, step: int) -> Batch:
        # Steps are counted from 1 where they are logged.
        replaced = self.order or step - self.offset + 1 in self.leave_out
        return self.batches.at(step + self.far if replaced else step)


@dataclass(frozen=True)
class Fitted(Checkpoint):
    """A checkpoint for a network with other scaling: what it lacks is new, and what it has too much of is left out."""

    own: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    scaled: bool = False
    """Whether the scaling is another one, none of whose tensors are those of the same name."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, state: TrainState, scaled: bool) -> Fitted:
        own = {"model": state.network.state_dict(), "ema": state.ema.state_dict(), "optimizer": moments_of_new(state)}
        return cls(checkpoint.path, checkpoint.step, checkpoint.metric, checkpoint.files, own, scaled)

    def tensors(self, group: str) -> dict[str, Tensor]:
        saved, own = super().tensors(group), self.own[group]
        if not saved:
            return saved  # An optimiser that has not begun.
        kept = {name: value for name, value in saved.items() if not (self.scaled and NAME in name.split("."))}
        return {name: kept[name] if name in kept else value.detach().clone().cpu() for name, value in own.items()}


def moments_of_new(state: TrainState) -> dict[str, Tensor]:
    """The slots of an AdamW that has seen no gradient, by name."""
    found = moments_of(state.optimizer, state.network)
    for name, weight in state.network.named_parameters():
        if weight.requires_grad and f"{name}.step" not in found:
            found |= {f"{name}.{slot}": torch.zeros_like(weight) for slot in ("exp_avg", "exp_avg_sq")}
            found[f"{name}.step"] = torch.zeros(())
    return found


def begin_clip(clip: AdaptiveClip, state: TrainState, beta2: float) -> None:
    """Let AdaGC know the usual norms at once, by Adam's averages of the squared gradient: γ = √(Σ v / (1 − β2^t))."""
    norms = []
    for weight in (weight for group in state.optimizer.param_groups for weight in group["params"]):
        slots = state.optimizer.state.get(weight)
        if not slots:
            return  # Nothing is known before the first step.
        norms.append((slots["exp_avg_sq"].sum() / (1 - beta2 ** float(slots["step"]))).sqrt().item())
    clip.load_state_dict({"steps": START, "norms": norms})


@torch.no_grad()
def put_back(weights: Mapping[str, Tensor], earlier: Mapping[str, Tensor], modules: tuple[str, ...]) -> None:
    """Give some modules their earlier weights, in place."""
    for name, value in weights.items():
        if any(name.startswith(f"{module}.") for module in modules):
            value.copy_(earlier[name])


def losses_of(folder: Path, first: int, last: int) -> list[float]:
    """The loss of each step after the first up to the last, in a run that logs every step; NaN where there is none."""
    path = Run(folder).metrics.path
    lines = read_metrics(path) if path.is_file() else []
    found = {line["step"]: float(line["loss"]) for line in lines if "lr" in line}
    return [found.get(step, math.nan) for step in range(first + 1, last + 1)]


def read_ended(folder: Path) -> Ended | None:
    """How a replay ended; None if it has not, or if that is to be found out again."""
    try:
        return Ended(**read_json(folder / FILE))
    except (Damaged, TypeError):
        return None
