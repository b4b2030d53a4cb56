"""What the runs of a method at several learning rates show: its survival curve, its edge, and what to train with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .collect import Records, initial_loss
from .grid import Arm, Plan
from .intervals import Estimate, largest_stable_rate, mean_interval
from .survival import Edge, RateTable, edge_ratio

Table = dict[str, Any]

Setting = tuple[int, int]
"""Depth and batch size."""

Sweeps = Mapping[tuple[str, Setting], tuple[Sequence[Arm], RateTable]]
"""By method and setting: the arms, the lowest rate first, and their runs."""

Base = tuple[str, RateTable]
"""What the baseline is called, and its runs."""


def describe_rates(plan: Plan, records: Records) -> list[Table]:
    """For each method that ran at several learning rates, where its edge is and how much the choice matters."""
    groups: dict[tuple[str, Setting], list[Arm]] = {}
    for arm in sorted(plan.arms, key=lambda arm: arm.axes["lr"]):
        groups.setdefault((arm.method.id, (arm.axes["depth"], arm.axes["batch"])), []).append(arm)
    sweeps = {key: (arms, table) for key, arms in groups.items() if (table := table_of(arms, records)) is not None}
    order = list(dict.fromkeys((arm.method.id, (arm.axes["depth"], arm.axes["batch"])) for arm in plan.arms))
    return [describe_sweep(plan, key, sweeps, records) for key in order if key in sweeps]


def table_of(arms: Sequence[Arm], records: Records) -> RateTable | None:
    """The runs of the seeds that have ended at every rate; None if there is none, or one rate only."""
    rows = zip(*(records[arm.id] for arm in arms), strict=True)
    seeds = [runs for runs in rows if all(run.outcome is not None for run in runs)]
    if not seeds or len(arms) < 2:
        return None
    survived, losses = (
        tuple(zip(*([getattr(run, name) for run in runs] for runs in seeds), strict=True))
        for name in ("survived", "measured_loss")
    )
    return RateTable(tuple(runs[0].seed for runs in seeds), tuple(arm.axes["lr"] for arm in arms), survived, losses)


def describe_sweep(plan: Plan, key: tuple[str, Setting], sweeps: Sweeps, records: Records) -> Table:
    """One method at one depth and batch size, against the baseline there."""
    (arms, table), base = sweeps[key], sweeps.get((plan.baseline.id, key[1]))
    first, is_base = arms[0], key[0] == plan.baseline.id
    against = None if is_base or base is None else (base[0][0].label, base[1])
    losses_before = [loss for arm in arms if (loss := initial_loss(records[arm.id])) is not None]
    untrained = losses_before[0] if losses_before else math.inf
    rows = zip(table.losses, table.survived, strict=True)
    # A rate at which a run failed has no mean: that of the others would flatter.
    losses = [[loss if survived else math.inf for loss, survived in zip(*row, strict=True)] for row in rows]
    spread = columns([mean_interval(row) for row in losses])
    return {
        "method": first.method.id,
        "label": first.label,
        **{name: first.axes[name] for name in ("depth", "batch")},
        "losses": spread["mean"],
        "low": spread["low"],
        "high": spread["high"],
        "largest_stable_rate": largest_stable_rate(table.rates, losses, untrained),
        **describe_edge(first.label, table, against, shared=plan.edge_rates, untrained=untrained, steps=plan.steps),
    }


def describe_edge(
    label: str, table: RateTable, base: Base | None, *, shared: Sequence[float], untrained: float, steps: int
) -> Table:
    """The survival curve of a method, its edge, the ratio to that of the baseline, and a sentence that says it.

    The sensitivity is over the rates that all methods share.
    """
    edge, best, seeds = table.edge, table.best, len(table.seeds)
    ratio = None if base is None else edge_ratio(table, base[1])
    low, high = zip(*table.shares, strict=True)
    survival = {"rates": table.rates, "mean": [count / seeds for count in table.counts], "low": low, "high": high}
    return {
        "rates": table.rates,
        "seeds": seeds,
        "survived": table.counts,
        "survival": survival,
        "edge": asdict(edge),
        "ratio": ratio and {**asdict(ratio), "verdict": ratio.verdict},
        "safe_rate": table.safe_rate,
        "best_rate": best and best[0],
        "best_loss": best and asdict(best[1]),
        "sensitivity": asdict(table.sensitivity(shared or table.rates, untrained)),
        "sentence": edge_sentence(label, table, edge, ratio, "" if base is None else base[0], steps),
    }


def edge_sentence(label: str, table: RateTable, edge: Edge, ratio: Edge | None, baseline: str, steps: int) -> str:
    """Where the edge is, with the length of the run, and how it compares.

    >>> table = RateTable((0, 1), (0.002, 0.004), ((True, True), (True, False)), ((0.1, 0.1), (0.1, 0.9)))
    >>> print(edge_sentence("CS", table, Edge(0.004, 0.003, 0.005), Edge(2.0, 1.5, 2.5), "none", 400))
    CS: half of its runs survive 400 steps at a rate of 0.004 (95 % interval 0.003 to 0.005, 2 seeds), 2.00× the edge of
    none (1.50 to 2.50): larger. All survive at 0.002.
    """
    safe = "At no rate do all survive." if table.safe_rate is None else f"All survive at {table.safe_rate:g}."
    if edge.value is None:
        far = "survive even the highest rate" if edge.bound == "at least" else "fail at every rate"
        return f"{label}: the edge cannot be told: more than half of its runs {far}, for {steps:,} steps. {safe}"
    seeds = f"{len(table.seeds)} seed{'s'[: len(table.seeds) > 1]}"
    interval = seeds if edge.low is None else f"95 % interval {edge.low:.3g} to {edge.high:.3g}, {seeds}"
    said = f"{label}: half of its runs survive {steps:,} steps at a rate of {bounded(edge, '.3g')} ({interval})"
    if ratio is not None:
        what = f"{bounded(ratio, '.2f')}× the edge of {baseline}" if ratio.value else f"against {baseline}"
        range_of = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
        said = f"{said}, {what}{range_of}: {ratio.verdict}"
    return f"{said}. {safe}"


def bounded(edge: Edge, form: str) -> str:
    return f"{edge.bound} {edge.value:{form}}" if edge.bound else f"{edge.value:{form}}"


def advice(found: Sequence[Table], steps: int) -> str:
    """What to train with, from the tables of a setting, the baseline's first or among them.

    Half of the edge, as the edge moves down with the length of the run; not more than what all runs survived.
    """
    known = [one for one in found if one["edge"]["value"] is not None]
    larger = [one for one in known if one["ratio"] and one["ratio"]["verdict"] == "larger"]
    plain = [one for one in known if one["ratio"] is None]
    if not larger and not plain:
        return "No advice: the edge of the baseline was not found. Try other rates."
    shown = "" if larger else "No method is shown to have a larger edge than the baseline. "
    chosen = max(larger or plain, key=lambda one: one["edge"]["value"])
    half, safe = chosen["edge"]["value"] / 2, chosen["safe_rate"]
    reason = f"half of its edge for {steps:,} steps"
    if safe is not None and safe < half:
        half, reason = safe, f"the largest rate that all its runs survived for {steps:,} steps"
    return f"{shown}Train with {chosen['label']} at {half:.2g}: {reason}."


def columns(found: Sequence[Estimate]) -> dict[str, list[float | None]]:
    """Several estimates side by side."""
    return {"mean": [x.value for x in found], "low": [x.low for x in found], "high": [x.high for x in found]}
