"""What the runs of a comparison say about the choice of the learning rate, as results.json has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .collect import Records, RunRecord
from .intervals import CONFIDENCE, as_dict, columns, mean_interval
from .plan import Arm, Plan
from .rates import largest_stable_rate, rate_sensitivity


def describe_rates(plan: Plan, records: Records) -> list[dict[str, Any]]:
    """For each method that ran at several rates, how much the choice of the rate matters."""
    groups: dict[tuple[str, int, int], list[Arm]] = {}
    for arm in plan.arms:
        groups.setdefault((arm.method.id, arm.depth, arm.batch), []).append(arm)
    found = [describe_sweep(arms, records) for arms in groups.values() if len(arms) > 1]
    return [sweep for sweep in found if sweep is not None]


def describe_sweep(arms: Sequence[Arm], records: Records) -> dict[str, Any] | None:
    """None until a seed has ended at every rate."""
    table = [[run for run in records[arm.id]] for arm in arms]
    seeds = [k for k in range(len(table[0])) if all(runs[k].outcome is not None for runs in table)]
    initial = next((loss for runs in table if (loss := initial_loss(runs)) is not None), None)
    if not seeds or initial is None:
        return None
    rates, losses = [arm.lr for arm in arms], [[runs[k].final_loss for k in seeds] for runs in table]
    means = [mean_interval(of_rate) for of_rate in losses]
    spread = columns(means)
    return {
        "method": arms[0].method.id,
        "label": arms[0].label,
        "depth": arms[0].depth,
        "batch": arms[0].batch,
        "rates": rates,
        "losses": spread["mean"],
        "low": spread["low"],
        "high": spread["high"],
        "sensitivity": as_dict(rate_sensitivity(rates, losses, initial, CONFIDENCE)),
        "largest_stable_rate": largest_stable_rate(rates, losses, initial),
    }


def initial_loss(runs: Sequence[RunRecord]) -> float | None:
    """The validation loss before training, on average over the runs that have ended."""
    found = [run.outcome.initial_loss for run in runs if run.outcome is not None and run.outcome.initial_loss]
    return math.fsum(found) / len(found) if found else None
