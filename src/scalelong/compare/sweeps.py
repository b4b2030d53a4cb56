"""The learning rates of a comparison: the runs of each method, depth and batch size as one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .collect import Records, initial_loss
from .edges import Table, describe_edge
from .grid import Arm, Plan
from .intervals import Estimate, largest_stable_rate, mean_interval
from .survival import RateTable

Setting = tuple[str, int | None, int]
"""The place in a transfer, the depth, if the network has one, and the batch size."""

Sweeps = Mapping[tuple[str, Setting], tuple[Sequence[Arm], RateTable]]
"""By method and setting: the arms, the lowest rate first, and their runs."""


def describe_rates(plan: Plan, records: Records) -> list[Table]:
    """For each method that ran at several learning rates, where its edge is and how much the choice matters."""
    sweeps = sweeps_of(plan, records)
    return [describe_sweep(plan, key, sweeps, records) for key in sweeps]


def sweeps_of(plan: Plan, records: Records) -> Sweeps:
    """Those with runs at two rates or more, in the plan's order."""
    groups: dict[tuple[str, Setting], list[Arm]] = {}
    for arm in plan.arms:
        groups.setdefault((arm.method.id, (arm.place, arm.axes["depth"], arm.axes["batch"])), []).append(arm)
    found = {key: sorted(arms, key=lambda arm: arm.axes["lr"]) for key, arms in groups.items()}
    return {key: (arms, table) for key, arms in found.items() if (table := table_of(arms, records)) is not None}


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
        "place": first.place,
        **{name: first.axes[name] for name in ("depth", "batch")},
        "losses": spread["mean"],
        "low": spread["low"],
        "high": spread["high"],
        "largest_stable_rate": largest_stable_rate(table.rates, losses, untrained),
        **describe_edge(first.label, table, against, shared=plan.edge_rates, untrained=untrained, steps=plan.steps),
    }


def columns(found: Sequence[Estimate]) -> dict[str, list[float | None]]:
    """Several estimates side by side."""
    return {"mean": [x.value for x in found], "low": [x.low for x in found], "high": [x.high for x in found]}
