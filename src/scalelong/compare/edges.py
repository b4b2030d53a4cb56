"""What the runs of a method at several learning rates show: its survival curve, its edge, and what to train with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .survival import Edge, RateTable, edge_ratio

Table = dict[str, Any]

Base = tuple[str, RateTable]
"""What the baseline is called, and its runs."""


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
    none (1.50 to 2.50): larger. All survive up to 0.002.
    """
    safe = "At no rate do all survive." if table.safe_rate is None else f"All survive up to {table.safe_rate:g}."
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
