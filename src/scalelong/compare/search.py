"""The search for the largest learning rate that training survives: a comparison whose rates grow towards the edge.

`find_edges(make_search("digits", ["none", "cs"], seeds=8), "runs/digits-edge")`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import load_recipe
from ..utils.atomic import read_json
from .grid import FILE, Method, Plan, PlanError, make_arm, make_plan, naming_plan
from .run import ADVICE, CompareResult, Display, compare
from .survival import next_rates

FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the recipe's learning rate: where all methods are tried first."""

Rates = Mapping[str, Iterable[float]]
"""By a method's id."""


@dataclass(frozen=True)
class EdgeSearch:
    """The runs that all methods begin with, and what makes more of them."""

    recipe: str | Path
    overrides: tuple[str, ...]
    first: Plan

    @property
    def methods(self) -> list[Method]:
        return list(dict.fromkeys(arm.method for arm in self.first.arms))

    def plan(self, more: Rates) -> Plan:
        """The first runs, and those at more rates; the lowest rate comes first."""
        arms = {arm.id: arm for arm in self.first.arms}
        for method in self.methods:
            for rate in more.get(method.id, ()):
                arm = make_arm(self.recipe, method, [(f"optim.lr={rate!r}", f"-lr{rate:g}")], self.overrides)
                arms.setdefault(arm.id, arm)
        return replace(self.first, arms=tuple(sorted(arms.values(), key=lambda arm: arm.axes["lr"])))


def make_search(
    recipe: str | Path,
    methods: Sequence[str],
    *,
    seeds: int = 8,
    rates: Sequence[float] = (),
    overrides: Sequence[str] = (),
) -> EdgeSearch:
    """Begin at these rates, or from half to eight times the recipe's.

    >>> [arm.id for arm in make_search("digits", ["cs"], rates=[2e-3, 4e-3]).plan({"cs": [3e-3]}).arms]
    ['cs-lr0.002', 'cs-lr0.003', 'cs-lr0.004']
    """
    own = load_recipe(recipe, overrides).optim.lr
    chosen = sorted(rates) or [float(f"{factor * own:.3g}") for factor in FACTORS]
    if len(chosen) < 2:
        raise PlanError(f"an edge lies between learning rates: give at least two, not {chosen[0]:g} alone")
    plan = make_plan(recipe, methods, seeds=seeds, rates=chosen, overrides=overrides)
    return EdgeSearch(recipe, tuple(overrides), replace(plan, edge_rates=tuple(chosen)))


def find_edges(
    search: EdgeSearch,
    out: str | Path,
    *,
    workers: int | None = None,
    display: Display | None = None,
    command: str = "",
    trains: bool = True,
) -> CompareResult:
    """Compare at more and more rates, until every edge is known well enough; the same call again resumes.

    Without `trains` it ends where runs are to be made, which `left` of the result names.
    """
    folder, display = Path(out), display or Display()
    more = rates_in(folder)
    while True:
        plan = search.plan(more)
        result = compare(plan, folder, workers=workers, display=display, command=command, trains=trains)
        wanted = closer(plan, result.results)
        runs_left = any(path.name != ADVICE for path in result.left)
        if result.signal is not None or result.failures or runs_left or not wanted:
            return result
        names = "; ".join(f"{name} at {', '.join(f'{rate:g}' for rate in rates)}" for name, rates in wanted.items())
        display.info(f"closer to the edge: {names}")
        for name, rates in wanted.items():
            more.setdefault(name, set()).update(rates)


def closer(plan: Plan, results: Mapping[str, Any]) -> dict[str, list[float]]:
    """The rates at which each method is to be tried next; a function of the runs that have ended."""
    found: dict[str, list[float]] = {}
    for sweep in results["rate_sensitivity"]:
        rates = next_rates(sweep["rates"], sweep["survived"], sweep["seeds"], plan.edge_rates)
        if rates:
            found[sweep["method"]] = rates
    return found


def rates_in(folder: Path) -> dict[str, set[float]]:
    """The rates of a search that was begun in the folder, by method."""
    found: dict[str, set[float]] = {}
    if (folder / FILE).is_file():
        with naming_plan(folder):
            for arm in read_json(folder / FILE)["arms"]:
                found.setdefault(arm["id"].rpartition("-lr")[0], set()).add(arm["config"]["optim"]["lr"])
    return found
