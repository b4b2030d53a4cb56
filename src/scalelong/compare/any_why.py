"""Why a training loop that is not ours collapsed: it is replayed with one change at a time, in this process."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..guard.losses import LossWatch
from ..skips import scale_skips
from ..utils.atomic import replace_text
from .causes import CHANGES, UNCHANGED, Change, Group, Judge, Tally, conclude, is_open, outliers
from .methods import PlanError

logger = logging.getLogger(__name__)

OWN_GROUPS: tuple[Group, ...] = ("rate", "optimiser", "clipping", "scaling")
"""What `Trial` changes by itself; for precision, data and module the loop has to do something."""

NOT_HERE = "adaptive-clip"
"""It needs a hundred steps to begin, unless a trainer knows what was before."""


@dataclass(frozen=True)
class Trial:
    """What is different in a replay: call it with the model and its optimiser when both are as at the checkpoint.

    That changes rates, β2, ε, clipping and scaling. The loop does the rest where it is asked to: `fp32`, `order`, the
    numbers of steps in `leave_out` (from 0), and `module`, whether one module is to have earlier weights.
    """

    change: Change = UNCHANGED
    leave_out: tuple[int, ...] = ()

    @property
    def fp32(self) -> bool:
        return self.change.id == "fp32"

    @property
    def order(self) -> bool:
        return self.change.id == "order"

    @property
    def module(self) -> bool:
        return self.change.id == "module"

    def __call__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make the change, in place."""
        settings = self.change.settings
        if self.change.scaling:
            known = {id(weight) for weight in model.parameters()}
            options = self.change.scaling
            scale_skips(model, options.pop("method"), **options)
            gates = [weight for weight in model.parameters() if id(weight) not in known]
            if gates:
                optimizer.add_param_group({"params": gates, "lr": optimizer.param_groups[0]["lr"]})
        for group in optimizer.param_groups:
            if "optim.beta2" in settings:
                group["betas"] = (group["betas"][0], settings["optim.beta2"])
            group["eps"] = settings.get("optim.eps", group["eps"])
        if "optim.lr" in settings:
            scale_rates(optimizer, settings["optim.lr"])
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if "optim.clip_norm" in settings:
            norm = settings["optim.clip_norm"]
            optimizer.register_step_pre_hook(lambda *args: ignore(nn.utils.clip_grad_norm_(weights, norm)))


Replay = Callable[[Trial, int], Iterable[float]]


def why(
    replay: Replay,
    *,
    groups: Sequence[Group] = OWN_GROUPS,
    replays: int = 4,
    nothing: float = 1.0,
    file: str | Path | None = None,
) -> Answer:
    """What saves your training from a collapse.

    `replay(trial, draw)` restores the checkpoint before it, calls `trial(model, optimizer)`, trains past the place of
    the collapse, and yields the loss of every step; `draw` 0 is with the noise of the run, others with other noise. One
    that yields is stopped as soon as it is lost. `nothing` is the loss of predicting nothing. `groups` may also have
    "precision", "data" and "module", if the loop does what a `Trial` then says. With a `file`, every replay is kept
    there, and the same call again goes on.
    """
    if replays < 1 or not groups or {*groups} - {change.group for change in CHANGES}:
        known = ", ".join(dict.fromkeys(change.group for change in CHANGES))
        raise PlanError(f"why takes a replay at least, and groups of {known}; not {replays} and {list(groups)}")
    loop = Loop(replay, nothing, None if file is None else Path(file))
    first = loop.run(Trial(), 0)
    leave_out = tuple(first["outliers"])
    for draw in range(1, replays):
        loop.run(Trial(), draw)
    most = replays
    if loop.tally(UNCHANGED).saved:  # Chance decides, which more replays tell better.
        most *= 2
        for draw in range(replays, most):
            loop.run(Trial(), draw)
    unchanged = loop.tally(UNCHANGED)
    left_out = {NOT_HERE, *(() if leave_out else ("batches",))}
    changes = [change for change in CHANGES if change.group in groups and change.id not in left_out]
    for change in changes:
        for draw in range(most):
            if is_open(loop.tally(change), unchanged, most):
                loop.run(Trial(change, leave_out if change.id == "batches" else ()), draw)
    return Answer((unchanged, *(loop.tally(change) for change in changes)))


@dataclass(frozen=True)
class Answer:
    """How many replays of each change were saved, nothing changed first."""

    tallies: tuple[Tally, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The kinds of changes that clearly save the run, the narrowest first."""
        return conclude(self.tallies).groups

    def __str__(self) -> str:
        rows = [f"- {tally.change.label}: {tally}" for tally in self.tallies]
        return "\n".join([*rows, conclude(self.tallies).sentence])


class Loop:
    """The replays of a user's loop that there are, and how to make one more."""

    def __init__(self, replay: Replay, nothing: float, file: Path | None) -> None:
        self.replay, self.nothing, self.file = replay, nothing, file
        self.place = 0
        """Losses before the collapse of the exact replay."""
        self.found: dict[str, dict[str, Any]] = {}
        if file is not None and file.is_file():
            content = json.loads(file.read_bytes())
            if content["nothing"] != nothing:
                raise PlanError(f"{file} holds replays for nothing={content['nothing']}, not {nothing}: name another")
            self.found = content["replays"]

    def run(self, trial: Trial, draw: int) -> dict[str, Any]:
        """The replay as it was made before, or made now."""
        key = f"{trial.change.id} {draw}"
        if key not in self.found:
            self.found[key] = self.make(trial, draw)
            logger.info("%s: %s", key, "survived" if self.found[key]["saved"] else "collapsed")
            if self.file is not None:
                content = {"nothing": self.nothing, "replays": self.found}
                replace_text(self.file, json.dumps(content, indent=1) + "\n")
        self.place = self.found["unchanged 0"]["begun"] or 0
        return self.found[key]

    def make(self, trial: Trial, draw: int) -> dict[str, Any]:
        judge = Judge(LossWatch(self.nothing), self.place)
        for loss in self.replay(trial, draw):
            if judge.add(float(loss)) or not math.isfinite(float(loss)):
                break
        if not judge.losses:
            raise ValueError(f"replay yielded no losses for {trial.change.id}, draw {draw}: yield that of every step")
        stood_out = outliers(judge.losses, judge.begun or 0) if trial.change == UNCHANGED else ()
        loss = judge.loss if judge.saved else None
        return {"saved": judge.saved, "begun": judge.begun, "loss": loss, "outliers": list(stood_out)}

    def tally(self, change: Change) -> Tally:
        rows = [row for key, row in self.found.items() if key.rpartition(" ")[0] == change.id]
        losses = [row["loss"] for row in rows if row["saved"]]
        return Tally(change, len(losses), len(rows), fmean(losses) if losses else None)


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply the rates while the optimiser steps, so that no scheduler sees it."""

    def change(by: float) -> Callable[..., None]:
        def hook(optimizer: Optimizer, *args: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= by

        return hook

    optimizer.register_step_pre_hook(change(factor))
    optimizer.register_step_post_hook(change(1 / factor))


def ignore(value: Any) -> None:
    """A hook that returns something would change the arguments of the step."""
