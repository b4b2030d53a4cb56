"""Whether the best learning rate is the same at every width: runs over rates, widths and both parametrizations.

`compare(make_transfer("digits", [32, 64, 128], seeds=3), "runs/digits-transfer")`
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from ..config import Config, RecipeError, load_recipe
from .collect import Records, initial_loss
from .edges import Table, bounded
from .grid import Arm, Plan, PlanError, Transfer, make_plan
from .intervals import mean_interval, paired_difference
from .survival import Bound, Edge, RateTable, edge_of
from .sweeps import columns, sweeps_of

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the recipe's learning rate: what is tried if no rates are given."""
STEP = 2.0
"""A best rate that moves by less has not moved: it is the step in which rates are tuned."""
NAMES = {"standard": "standard", "mup": "μP"}


def make_transfer(
    recipe: str | Path,
    widths: Sequence[int],
    *,
    rates: Sequence[float] = (),
    seeds: int = 3,
    methods: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> Plan:
    """Every width at every rate in both parametrizations, which are the same at the smallest width.

    >>> [arm.id for arm in make_transfer("digits", [32, 64], rates=[1e-3, 2e-3, 4e-3]).arms][2:5]
    ['width32-cs-lr0.004', 'standard-width64-cs-lr0.001', 'standard-width64-cs-lr0.002']
    """
    config, chosen = standard_recipe(recipe, overrides), sorted(set(widths))
    if len(chosen) < 2 or chosen[0] < 1:
        raise PlanError(f"--widths: a transfer goes from one width to others: give two or more, not {list(widths)}")
    rates = sorted(rates) or [float(f"{factor * config.optim.lr:.3g}") for factor in FACTORS]
    if len(rates) < 3:
        raise PlanError(f"--lr: a best rate lies between others: give three or more, not {len(rates)}")
    plans, base = [], chosen[0]
    for name, width in [("", base), *((name, width) for name in NAMES for width in chosen[1:])]:
        kind = f"{NAMES[name]}, " if name else ""
        own = [*overrides, f"model.parametrization={name or 'standard'}", *settings_at(recipe, overrides, base, width)]
        plan = make_plan(recipe, methods or [config.scaling.method], seeds=seeds, rates=rates, overrides=own)
        prefix = f"{name}-width{width}-".removeprefix("-")
        arms = [replace(arm, id=prefix + arm.id, place=f"{kind}width {width}") for arm in plan.arms]
        plans.append(replace(plan, arms=tuple(arms)))
    arms = tuple(arm for plan in plans for arm in plan.arms)
    return replace(plans[0], arms=arms, transfer=Transfer(str(recipe), tuple(overrides), base))


def standard_recipe(recipe: str | Path, overrides: Sequence[str]) -> Config:
    """The recipe without its parametrization, for which it may name no base."""
    return load_recipe(recipe, [*overrides, "model.parametrization=standard"])


def settings_at(recipe: str | Path, overrides: Sequence[str], base: int, width: int) -> list[str]:
    """What makes a recipe one of another width."""
    try:
        sizes = standard_recipe(recipe, overrides).model.at_width(width)
    except RecipeError:
        raise
    except ValueError as error:
        raise PlanError(f"--widths: {error}") from error
    return [f"model.{key}={value}" for key, value in {"base_width": base, **sizes}.items()]


@dataclass(frozen=True)
class Family:
    """The runs of a method in one parametrization: a table of rates for each width, the smallest first."""

    name: str
    tables: Mapping[int, RateTable]
    untrained: float

    @property
    def label(self) -> str:
        return NAMES[self.name]

    @property
    def ends(self) -> tuple[int, int]:
        """The smallest and the largest width."""
        return min(self.tables), max(self.tables)

    def logs(self, width: int) -> dict[int, float]:
        """The logarithm of each seed's best rate."""
        table = self.tables[width]
        columns = zip(table.seeds, zip(*table.losses, strict=True), strict=True)
        return {seed: best_log(table.rates, losses, self.untrained) for seed, losses in columns}

    def best_rate(self, width: int) -> float:
        """Of those that were tried the one with the lowest mean loss."""
        table = self.tables[width]
        means = [fmean(min(loss, self.untrained) for loss in losses) for losses in table.losses]
        return table.rates[means.index(min(means))]

    def bound(self, width: int) -> Bound | None:
        """What the best rate found is to the true one, where a seed's lies at an end of the rates."""
        rates, logs = self.tables[width].rates, self.logs(width).values()
        above, below = math.log(rates[-1]) in logs, math.log(rates[0]) in logs
        return None if above == below else "at least" if above else "at most"

    def best(self, width: int) -> Edge:
        """The best rate: the geometric mean over seeds, with its interval; none where a seed's may lie outside."""
        found = edge_of([*self.logs(width).values()], self.bound(width), 0.0)
        return found if found.bound is None else Edge(found.value, bound=found.bound)

    @property
    def shift(self) -> Edge:
        """The best rate of the largest width over that of the smallest, by pairs of the same seed."""
        first, last = self.ends
        here, there = self.logs(first), self.logs(last)
        pairs = [there[seed] - here[seed] for seed in here if seed in there]
        above = self.bound(last) == "at least" or self.bound(first) == "at most"
        below = self.bound(last) == "at most" or self.bound(first) == "at least"
        if above and below:
            return Edge(None)
        return edge_of(pairs, "at least" if above else "at most" if below else None, 0.0)

    @property
    def verdict(self) -> str:
        """Of "moves", "does not move" and "cannot be told"; by a bound only what lies beyond it can be told."""
        shift = self.shift
        if shift.low is None or shift.high is None:
            return "cannot be told"
        if (shift.high <= 1 / STEP and shift.bound != "at least") or (shift.low >= STEP and shift.bound != "at most"):
            return "moves"
        inside = shift.low > 1 / STEP and shift.high < STEP and shift.bound is None
        return "does not move" if inside else "cannot be told"

    def sentence(self) -> str:
        """Where the best rates of both ends are, and whether they are the same."""
        first, last = self.ends
        said = {
            "moves": f"it moves by more than a factor of {STEP:g}",
            "does not move": f"it moves by less than a factor of {STEP:g}",
            "cannot be told": f"whether it moves by a factor of {STEP:g} cannot be told",
        }[self.verdict]
        here, there = (f"{ranged(self.best(width), '.3g')} at width {width}" for width in (first, last))
        times = "" if self.shift.value is None else f", {ranged(self.shift, '.2f')} times that"
        return f"{self.label}: the best rate is {here} and {there}{times}: {said}."


def best_log(rates: Sequence[float], losses: Sequence[float], untrained: float) -> float:
    """The logarithm of the best rate: the vertex of the parabola through the lowest loss and its neighbours.

    A loss above the untrained network's counts as that: how far above it says nothing of where the best is.

    >>> [round(math.exp(best_log([1, 2, 4], losses, 1.0)), 3) for losses in ([0.3, 0.2, 0.3], [0.1, 0.2, 0.3])]
    [2.0, 1.0]
    """
    # A loss that is not a number compares as false.
    capped = [loss if loss < untrained else untrained for loss in losses]
    lowest = capped.index(min(capped))
    xs = [math.log(rate) for rate in rates]
    if not 0 < lowest < len(xs) - 1:
        return xs[lowest]
    (a, b, c), (u, v, w) = xs[lowest - 1 : lowest + 2], capped[lowest - 1 : lowest + 2]
    left, right = (v - w) * (b - a), (v - u) * (b - c)
    return b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right) if left != right else b


def ranged(found: Edge, form: str) -> str:
    interval = "" if found.low is None else f" ({found.low:{form}} to {found.high:{form}})"
    return f"{bounded(found, form)}{interval}"


def describe_transfer(plan: Plan, records: Records) -> list[Table] | None:
    """For each method what the runs say of its best rates; those of the smallest width belong to both parametrizations.

    None if it was not asked; a method with a width that has no whole seed yet is left out.
    """
    if plan.transfer is None:
        return None
    sweeps, found, base = sweeps_of(plan, records), [], plan.transfer.base
    widths = {arm.axes["width"] for arm in plan.arms}
    for method in dict.fromkeys(arm.method for arm in plan.arms):
        own = [(arms[0], table) for (name, _), (arms, table) in sweeps.items() if name == method.id]
        untrained = max((initial_loss(records[arm.id]) or 0.0 for arm, _ in own), default=0.0) or math.inf
        standard, mup = (Family(name, tables_of(own, name, base), untrained) for name in NAMES)
        if own and standard.tables.keys() == mup.tables.keys() == widths:
            command = partial(train_command, plan.transfer, method.overrides)
            found.append({"method": method.id, "label": own[0][0].label, **describe_method(standard, mup, command)})
    return found


def tables_of(own: Sequence[tuple[Arm, RateTable]], name: str, base: int) -> dict[int, RateTable]:
    """Those of a parametrization by width, the smallest first; at the base it is the other one, too."""
    at = [(arm.axes["width"], arm.axes["parametrization"], table) for arm, table in own]
    return dict(sorted((width, table) for width, kind, table in at if kind == name or width == base))


def describe_method(standard: Family, mup: Family, command: Callable[[int, float], str]) -> Table:
    """The best rates of a method, what μP's costs against the tuned standard, and how to train at the largest width."""
    first, last = mup.ends
    advice = f"No advice: that the best rate of μP stays within a factor of {STEP:g} is not shown."
    if mup.verdict == "does not move":
        advice = f"Tune at width {first}, train at width {last}: {command(last, mup.best_rate(first))}"
    return {
        "families": [describe_family(family) for family in (standard, mup)],
        "carried": compare_carried(standard, mup),
        "advice": advice,
    }


def describe_family(family: Family) -> Table:
    """The losses over the rates for each width, where the best rate is, and how it moves."""
    found = []
    for width, table in family.tables.items():
        spread = columns([mean_interval(losses) for losses in table.losses])
        best = {**asdict(family.best(width)), "logs": [*family.logs(width).values()]}
        runs = {"seeds": table.seeds, "rates": table.rates, "losses": table.losses}
        found.append({"width": width, **runs, **spread, "best": best})
    shift = {**asdict(family.shift), "verdict": family.verdict}
    return {"name": family.name, "label": family.label, "widths": found, "shift": shift, "sentence": family.sentence()}


def compare_carried(standard: Family, mup: Family) -> Table:
    """μP at the largest width at the best rate of the smallest, against standard at its own best."""
    first, last = mup.ends
    rates = mup.best_rate(first), standard.best_rate(last)
    of_rates = [losses_at(family.tables[last], rate) for family, rate in zip((mup, standard), rates, strict=True)]
    seeds = [seed for seed in of_rates[0] if seed in of_rates[1]]
    ours, theirs = ([losses[seed] for seed in seeds] for losses in of_rates)
    found, losses = paired_difference(ours, theirs), [mean_interval(values).value for values in (ours, theirs)]
    said = f"At width {last} μP at {rates[0]:g}, the best rate of width {first}, ends at {show(losses[0])}"
    said += f", standard at its own best of {rates[1]:g} at {show(losses[1])}"
    if found.value is not None and found.low is not None:
        said += f": a difference of {found.value:+.4f} ({found.low:+.4f} to {found.high:+.4f})"
    return {"rates": rates, "losses": losses, "difference": asdict(found), "sentence": f"{said}."}


def losses_at(table: RateTable, rate: float) -> dict[int, float]:
    """By seed."""
    return dict(zip(table.seeds, table.losses[table.rates.index(rate)], strict=True))


def show(loss: float | None) -> str:
    return "no finite loss" if loss is None else f"{loss:.4f}"


def train_command(transfer: Transfer, method: Sequence[str], width: int, rate: float) -> str:
    """What trains the recipe at another width with the rate that was tuned at the base."""
    settings = settings_at(transfer.recipe, transfer.overrides, transfer.base, width)
    kind = ("model.parametrization=mup", *settings, f"optim.lr={rate:g}")
    chosen: dict[str, str] = {each.partition("=")[0]: each for each in (*transfer.overrides, *method, *kind)}
    words = [word for setting in chosen.values() for word in ("--set", setting)]
    return shlex.join(["scalelong", "train", transfer.recipe, *words])
