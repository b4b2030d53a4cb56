"""What is compared: every method at every learning rate, depth and batch size, each with the same seeds.

The folder of a comparison keeps it in comparison.json: it may grow, but not change.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..config import Config, load_recipe
from ..config.build import note_start
from ..config.load import check_config
from ..monitor.readings import with_nulls
from ..runs.run_dir import Run, check_folder
from ..utils.atomic import Damaged, read_json, replace_text, write_signed
from ..utils.records import flatten
from .methods import Method, PlanError, check_rates, safe

FILE = "comparison.json"
HINT = ": give the same command to resume, more seeds or methods to extend it, or another --out"

POINTS = 20  # Points of a validation curve, at least, unless the recipe asks for more.
FEWEST_POINTS = 5  # Fewer leave nothing to compare a curve by.
READINGS = 100  # Readings of the monitor over a run.


@dataclass(frozen=True)
class Arm:
    """One method at one setting; its runs differ in the seed only. `config` has the recipe's own seed."""

    id: str
    method: Method
    config: Config
    place: str = ""
    """What its setting is called by before the rest: the parametrization and width of a transfer."""

    @property
    def options(self) -> dict[str, Any]:
        """The method's options, with the constants that it takes if none are given."""
        where = {} if self.config.scaling.where == "input" else {"where": self.config.scaling.where}
        return {**self.method.constants, **self.config.scaling.options, **where}

    @property
    def label(self) -> str:
        """The method for people, without its setting."""
        return self.method.label(self.options)

    @property
    def axes(self) -> dict[str, Any]:
        """What arms are crossed by, besides the method."""
        config = self.config
        sizes = {"depth": config.model.depth, "batch": config.training.batch_size, "width": config.model.width}
        return {"lr": config.optim.lr, **sizes, "parametrization": config.model.parametrization}

    @property
    def setting(self) -> str:
        """Arms of the same setting are compared with each other."""
        rate = "lr {lr:g}" if self.method.rate is None else "each at its own lr"
        depth = "" if self.axes["depth"] is None else "depth {depth}, "
        place = f"{self.place}, " if self.place else ""
        return f"{place}{rate}, {depth}batch {{batch}}".format(**self.axes)


@dataclass(frozen=True)
class PlannedRun:
    """One run of an arm; the folder is relative to the comparison's."""

    arm: Arm
    seed: int

    @property
    def folder(self) -> Path:
        return Path("runs") / self.arm.id / f"seed-{self.seed}"

    @property
    def config(self) -> Config:
        return self.arm.config.model_copy(update={"seed": self.seed})


@dataclass(frozen=True)
class Transfer:
    """The recipe of a transfer as it was named, what replaces its values, and the width at which all begin."""

    recipe: str
    overrides: tuple[str, ...]
    base: int


@dataclass(frozen=True)
class Plan:
    """A whole comparison. Seed k is the recipe's seed plus k."""

    recipe: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: Method
    edge_rates: tuple[float, ...] = ()
    """The rates that all methods share, if the edge of each is looked for: those who failed are then stopped early."""
    transfer: Transfer | None = None
    """How to train what it finds, if it asks whether the best rate is the same at every width."""

    @property
    def runs(self) -> list[PlannedRun]:
        """Seed by seed, so that the runs of a pair see the same load of the machine; no arm is always the first."""
        arms, count = self.arms * 2, len(self.arms)
        turns = [(arms[k % count : k % count + count], seed) for k, seed in enumerate(self.seeds)]
        return [PlannedRun(arm, seed) for turn, seed in turns for arm in turn]

    @property
    def steps(self) -> int:
        return self.arms[0].config.training.steps

    def pairs(self) -> Iterator[tuple[Arm, Arm]]:
        """Every arm that is not the baseline, with the baseline of its setting if that is run."""
        bases = {arm.setting: arm for arm in self.arms if arm.method == self.baseline}
        others = [arm for arm in self.arms if arm.method != self.baseline]
        return ((arm, bases[arm.setting]) for arm in others if arm.setting in bases)


def make_plan(
    recipe: str | Path,
    methods: Sequence[str],
    *,
    seeds: int = 5,
    rates: Sequence[float] = (),
    depths: Sequence[int] = (),
    batches: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> Plan:
    """Cross methods with settings; the baseline is `none`, or the first method if that is not among them.

    >>> [arm.id for arm in make_plan("digits", ["none", "cs"], rates=[1e-3, 2e-3]).arms]
    ['none-lr0.001', 'cs-lr0.001', 'none-lr0.002', 'cs-lr0.002']
    """
    if seeds < 1:
        raise PlanError(f"a comparison needs at least one seed, got {seeds}")
    chosen = [Method.parse(text) for text in methods]
    if not chosen:
        raise PlanError("no methods to compare: give some, for instance --methods none,cs,ls")
    if twice := next((method for method in chosen if chosen.count(method) > 1), None):
        raise PlanError(f"--methods names {twice.id!r} twice")
    check_rates(chosen, rates)
    own = bool(depths) and load_recipe(recipe, overrides).model.kind == "python"
    axes = axis("lr", "optim.lr", rates), axis("depth", "model.options.depth" if own else "model.depth", depths)
    settings = list(itertools.product(*axes, axis("batch", "training.batch_size", batches)))
    arms = [make_arm(recipe, method, setting, overrides) for setting in settings for method in chosen]
    check_different(arms)
    baseline = next((method for method in chosen if method.name == "none"), chosen[0])
    first = arms[0].config
    return Plan(first.name, tuple(arms), tuple(first.seed + k for k in range(seeds)), baseline)


def axis(name: str, key: str, values: Sequence[float]) -> list[tuple[str, str]]:
    """The overrides of one axis, each with what it adds to an arm's id; a value that is alone adds nothing."""
    if len(set(values)) < len(values):
        raise PlanError(f"--{name} has a value twice: {', '.join(f'{value:g}' for value in values)}")
    if not values:
        return [("", "")]
    return [(f"{key}={value!r}", f"-{name}{value:g}" if len(values) > 1 else "") for value in values]


def make_arm(recipe: str | Path, method: Method, setting: Sequence[tuple[str, str]], overrides: Sequence[str]) -> Arm:
    crossed = [override for override, _ in setting if override]
    config = note_start(load_recipe(recipe, [*overrides, *crossed, *method.overrides]))
    explicit = {override.partition("=")[0].strip() for override in overrides}
    suffix = safe("".join(suffix for _, suffix in setting))
    return Arm(method.id + suffix, method, with_intervals(config, explicit))


def check_different(arms: Sequence[Arm]) -> None:
    """Raise if two methods come to the same: their runs would be equal to the bit, and look like no effect."""
    for one, other in itertools.combinations(arms, 2):
        same = (one.method.name, one.options) == (other.method.name, other.options)
        if same and one.config == other.config:
            raise PlanError(f"{one.id} and {other.id} are the same method with the same options")


def with_intervals(config: Config, explicit: set[str]) -> Config:
    """The recipe with intervals that suit a comparison, except for those that the user set."""
    training, steps = config.training, config.training.steps
    every = min(training.validate_every or steps, max(1, steps // POINTS))
    intervals = {
        "validate_every": every,
        "log_every": min(training.log_every, max(1, every // 4)),  # Most laps have no evaluation in their time.
        "sample_every": steps,
        "checkpoint_every": min(training.checkpoint_every, max(1, steps // 10)),
        "keep_last": 1,
        "seat_belt": False,  # Or no run would fail.
        "monitor_every": None if training.compile else training.monitor_every or max(1, steps // READINGS),
    }
    found = with_training(config, {key: value for key, value in intervals.items() if f"training.{key}" not in explicit})
    every = found.training.validate_every
    points = 0 if every is None else math.ceil(steps / every)
    if points < FEWEST_POINTS:
        raise PlanError(
            f"training.validate_every={every} leaves {points} points on a curve of {steps} steps, and a comparison "
            f"needs {FEWEST_POINTS}: leave validate_every to compare, or train longer"
        )
    return found


def with_training(config: Config, changes: dict[str, Any]) -> Config:
    content = config.model_dump()
    return Config.model_validate({**content, "training": {**content["training"], **changes}})


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, content: Any) -> None:
    """A JSON file that is complete or, as before, the old one; a number that is not finite is null."""
    replace_text(path, json.dumps(with_nulls(content), indent=1) + "\n")


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as JSON, with every arm's resolved recipe."""
    arms = [
        {"id": arm.id, "label": arm.label, "setting": arm.setting, "config": arm.config.model_dump(mode="json")}
        for arm in plan.arms
    ]
    what = {"recipe": plan.recipe, "seeds": list(plan.seeds), "baseline": plan.baseline.id}
    return {**what, "edge_rates": list(plan.edge_rates), "arms": arms}


def save_plan(folder: Path, plan: Plan, command: str) -> str:
    """Write what is compared, if the folder is free for it; returns when the comparison was first begun."""
    created = check_plan(folder, plan).get("created") or now()
    write_signed(folder / FILE, {"created": created, "command": command, **with_nulls(describe_plan(plan))})
    return created


def check_plan(folder: Path, plan: Plan) -> dict[str, Any]:
    """Raise unless the folder is new, or holds this comparison or a part of it; returns what it holds."""
    if not (folder / FILE).is_file():
        if Run(folder).exists:
            raise PlanError(f"{folder} is the folder of a single run: choose another --out")
        check_folder(Run(folder))
        return {}
    with naming_plan(folder):
        before = read_json(folder / FILE)
        check_same_plan(folder, before, plan)
    return before


@contextmanager
def naming_plan(folder: Path) -> Iterator[None]:
    """For reading comparison.json: one that was changed is never taken for what was compared."""
    try:
        yield
    except (Damaged, KeyError, TypeError, AttributeError) as damage:
        raise PlanError(
            f"{folder / FILE} does not say what is compared, as it is damaged or was changed ({damage}): "
            "put it back, or choose another --out"
        ) from damage


def check_same_plan(folder: Path, before: dict[str, Any], plan: Plan) -> None:
    """Raise unless a plan has all of what was compared before, with the same settings."""
    asked = describe_plan(plan)
    arms = {arm["id"]: flatten(arm["config"]) for arm in asked["arms"]}
    for arm in before["arms"]:
        if arm["id"] not in arms:
            raise PlanError(f"{folder} holds a comparison with {arm['id']}, which is not asked for now{HINT}")
        # Checked, for the keys that there were not yet.
        config = check_config(arm["config"], {(): f"{folder / FILE}, {arm['id']}"})
        old, new = flatten(config.model_dump(mode="json")), arms[arm["id"]]
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if changed := ", ".join(f"{key} {old.get(key)} → {new.get(key)}" for key in keys[:4]):
            raise PlanError(f"{folder} holds a comparison with other settings of {arm['id']} ({changed}){HINT}")
    if not set(before["seeds"]) <= set(plan.seeds):
        raise PlanError(f"{folder} holds a comparison with {len(before['seeds'])} seeds, now {len(plan.seeds)}{HINT}")
    if (old := before.get("edge_rates", [])) != asked["edge_rates"]:
        raise PlanError(f"{folder} looks for the edge from the rates {old}, not from {asked['edge_rates']}{HINT}")
    if before["baseline"] != asked["baseline"]:
        raise PlanError(f"{folder} compares with {before['baseline']}, not with {asked['baseline']}{HINT}")
