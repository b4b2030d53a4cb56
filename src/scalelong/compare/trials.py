"""Which changes are tried on a run that collapsed: recipe and task of each replay, and the command that goes on so."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..config.build import build_model, known_sites
from ..guard.belt import GROWN, parts_of
from ..guard.losses import WINDOW
from ..runs import Checkpoint, Run, read_metrics
from ..runs.run_dir import last_precision
from ..skips import AbsorbedScalingWarning, find_skips
from ..utils.records import flatten
from .causes import CHANGES, UNCHANGED, Change
from .collapse import Collapse
from .replay import Task

SHORTEST = 200
"""Steps past the place of a collapse that a replay goes on for, at least."""

READING = re.compile(r"block/(.+)/feature")


@dataclass(frozen=True)
class Trial:
    """A change, and how its replays are made; `sets` are the overrides of the run's recipe that make it."""

    change: Change
    config: Config
    task: Task
    sets: tuple[str, ...] = ()
    from_replay: bool = False
    """Whether only a replay's checkpoint holds what was changed."""

    def name(self, draw: int) -> Path:
        return Path("replays") / f"{self.change.id}-{self.task.step}-to-{self.task.end}-{draw}"

    def command(self, run: Run, folder: Path, checkpoint: Path | None = None) -> str:
        """What resumes the run with this change, for a shell."""
        place = checkpoint or self.task.checkpoint
        if self.from_replay:
            place = folder / self.name(0) / "checkpoints" / f"step-{self.task.end:06d}"
        words = ["scalelong", "train", str(run.config_file), "--resume", str(place)]
        words += ["--out", f"{run.folder}-{self.change.id}"]
        return shlex.join([*words, *(word for setting in self.sets for word in ("--set", setting))])


def unchanged_trial(run: Run, found: Collapse, checkpoint: Checkpoint, after: int | None) -> Trial:
    """The replay with nothing changed: the seat belt is off, every step is logged, and a checkpoint is its end."""
    start = checkpoint.step
    end = found.seen + (max(SHORTEST, found.seen - start) if after is None else after)
    if found.config.optim.schedule != "constant":
        end = min(end, found.config.training.steps)  # Its rates would be others if it were longer.
    content = found.config.model_dump()
    content["optim"]["lr"] *= found.factor
    content["evaluation"]["every"] = None
    precision = last_precision(run) or found.config.training.precision
    content["training"] |= {"seat_belt": False, "log_every": 1, "validate_every": end, "sample_every": None}
    content["training"] |= {"steps": max(end, found.config.training.steps), "checkpoint_every": 500, "keep_last": 1}
    content["training"] |= {"monitor_every": None, "trackers": (), "parallel": "ddp", "precision": precision}
    task = Task(checkpoint.path.resolve(), start, found.seen, end, found.watch(checkpoint), found.limit)
    sets = (f"optim.lr={content['optim']['lr']!r}",) if found.factor != 1 else ()
    return Trial(UNCHANGED, Config.model_validate(content), task, sets)


def watched(trial: Trial) -> Trial:
    """The same replay, with readings of what its blocks measure."""
    if trial.config.training.compile:
        return trial
    training = trial.config.training.model_copy(update={"monitor_every": WINDOW})
    return replace(trial, config=trial.config.model_copy(update={"training": training}))


def plan_trials(base: Trial, found: Collapse, exact: Path) -> tuple[list[Trial], dict[str, str]]:
    """One trial for each change that applies, and why the others do not; `exact` is the folder of the exact replay."""
    trials, left_out = [], {}
    for change in CHANGES:
        made = reason_against(change, base.config) or plan_trial(change, base, found, exact)
        if isinstance(made, str):
            left_out[change.id] = made
        else:
            trials.append(made)
    return trials, left_out


def plan_trial(change: Change, base: Trial, found: Collapse, exact: Path) -> Trial | str:
    task = base.task
    if change.id == "order":
        return replace(base, change=change, task=replace(task, order=True), from_replay=True)
    if change.id == "batches":
        steps = outlying_steps(exact)
        task = replace(task, leave_out=steps)
        which = "one batch" if len(steps) == 1 else f"{len(steps)} batches"
        label = f"without {which} that stood out (from step {steps[0]} on)" if steps else ""
        named = replace(change, label=label)
        return replace(base, change=named, task=task, from_replay=True) if steps else "no loss stood out"
    if change.id == "module":
        path = grown_module(base, found, exact)
        earlier = earlier_weights(found, task)
        if not path or earlier is None:
            return "no module had grown" if earlier is not None else "there are no earlier weights"
        named = replace(change, label=f"{path} as it was earlier")
        return replace(base, change=named, task=replace(task, modules=(path,), earlier=earlier), from_replay=True)
    config = with_settings(base.config, change.settings)
    scaled = change.group == "scaling"
    if scaled and (why_not := cannot_scale(config)):
        return why_not
    sets = tuple(f"{key}={text}" for key, text in overrides(config, change).items())
    kept = tuple(text for text in base.sets if text.partition("=")[0] not in {one.partition("=")[0] for one in sets})
    return Trial(change, config, replace(task, scaled=scaled), (*kept, *sets), from_replay=scaled)


def reason_against(change: Change, config: Config) -> str:
    """Why a change would change nothing; empty if it would."""
    optim, scaling = config.optim, config.scaling
    already = {
        "beta2": optim.betas[1] <= 0.95,
        "eps": optim.eps >= 1e-6,
        "clip-norm": optim.clip_norm is not None and optim.clip_norm <= 1,
        "adaptive-clip": optim.adaptive_clip is not None,
        "fp32": config.training.precision == "fp32",
        "cs": (scaling.method, scaling.where) == ("cs", "input"),
        "ls": scaling.method == "ls",
        "after-norm": scaling.where == "after-norm",
    }
    return "the run had it already" if already.get(change.id) else ""


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    content = config.model_dump()
    if "scaling.method" in settings:
        content["scaling"] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if key == "optim.lr":
            value = float(f"{value * config.optim.lr:.6g}")
        if key == "optim.beta2":
            name, value = "betas", (config.optim.betas[0], value)
        content[section][name] = value
    return Config.model_validate(content)


def overrides(config: Config, change: Change) -> dict[str, str]:
    """What `--set` is given to make a change."""
    keys = ["optim.betas" if key == "optim.beta2" else key for key in change.settings]
    found = flatten(config.model_dump(mode="json"))
    return {key: found[key] if isinstance(found[key], str) else json.dumps(found[key]) for key in keys}


def cannot_scale(config: Config) -> str:
    """Why the skips cannot be scaled so; empty if they can."""
    try:
        plain = build_model(with_settings(config, {"scaling.method": "none"}))
        sites = known_sites(plain, config) or find_skips(plain)
        if config.scaling.where == "after-norm" and not any(site.absorbed for site in sites):
            return "no norm reads the skips"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AbsorbedScalingWarning)
            build_model(config)
    except ValueError as error:
        return f"cannot be applied: {error}"
    return ""


def outlying_steps(exact: Path) -> tuple[int, ...]:
    """The first steps whose loss stood out, until shortly after the collapse: then all do."""
    lines = read_metrics(exact / "metrics.jsonl")
    found = [line["step"] for line in lines if line.get("event") in ("spike", "skipped")]
    return tuple(found[:WINDOW])


def earlier_weights(found: Collapse, task: Task) -> tuple[Path, str] | None:
    """The checkpoint and the group in it with weights from before the one that replays begin at."""
    older = [one for one in found.stored if one.step < task.step]
    if older:
        return older[-1].path.resolve(), "model"
    return (task.checkpoint, "ema") if task.step else None


def grown_module(base: Trial, found: Collapse, exact: Path) -> str:
    """The block whose weights had grown most by the checkpoint, or else whose output grew first; empty if none did."""
    blocks = list(parts_of(build_model(base.config, fresh=False)))
    earlier = earlier_weights(found, base.task)
    if earlier is not None:
        checkpoints = {one.path.resolve(): one for one in found.stored}
        before = checkpoints[earlier[0]].tensors(earlier[1])
        now = checkpoints[base.task.checkpoint].tensors("model")
        growths = {block: size_of(now, block) / (size_of(before, block) or torch.inf) for block in blocks}
        most = max(growths, key=growths.__getitem__)
        if growths[most] > GROWN:
            return most
    return first_grown(read_metrics(exact / "metrics.jsonl"), blocks)


def size_of(weights: Mapping[str, Tensor], block: str) -> float:
    norms = [value.float().norm() for name, value in weights.items() if name.startswith(f"{block}.")]
    return torch.stack(norms).norm().item() if norms else 0.0


def first_grown(lines: Sequence[Mapping[str, Any]], blocks: Sequence[str]) -> str:
    """The first block, in time and then in the network, whose output measured twice what it did at first."""
    first: dict[str, float] = {}
    for line in lines:
        sizes = {match[1]: float(value) for key, value in line.items() if (match := READING.fullmatch(key))}
        for block in blocks:
            size = sizes.get(block)
            if size is not None and size > GROWN * first.setdefault(block, size):
                return block
    return ""
