"""What a search for the edge prints in the end: survivors by rate, edges, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from .console import NOTHING, make_table, print_line, print_table

Results = Mapping[str, Any]


def print_edges(results: Results) -> None:
    """Two tables, a sentence for each method, and the advice."""
    sweeps = results["rate_sensitivity"]
    if sweeps:
        print_line(
            f"{results['recipe']}, {results['steps']:,} steps: seeds that survive, by learning rate", style="bold"
        )
        print_table(survivors_table(sweeps))
        print_table(edges_table(sweeps))
    print_sentences(results)
    for warning in results["warnings"]:
        print_line(f"warning: {warning}", style="yellow")


def print_sentences(results: Results) -> None:
    for sweep in results["rate_sensitivity"]:
        print_line(f"- {sweep['sentence']}")
    if results["advice"]:
        print_line(results["advice"], style="bold")


def survivors_table(sweeps: Sequence[Results]) -> Table:
    rates = sorted({rate for sweep in sweeps for rate in sweep["rates"]})
    table = make_table("method", *(f">{rate:g}" for rate in rates))
    for sweep in sweeps:
        counts = dict(zip(sweep["rates"], sweep["survived"], strict=True))
        cells = [f"{counts[rate]} of {sweep['seeds']}" if rate in counts else "" for rate in rates]
        table.add_row(Text(sweep["label"]), *cells)
    return table


def edges_table(sweeps: Sequence[Results]) -> Table:
    table = make_table("method", ">edge", ">ratio of edges", ">safe rate", ">best loss", ">at rate", ">sensitivity")
    for sweep in sweeps:
        best = sweep["best_loss"] and sweep["best_loss"]["value"]
        table.add_row(
            Text(sweep["label"]),
            ranged(sweep["edge"], ".3g"),
            ranged(sweep["ratio"], ".2f", "×"),
            shown(sweep["safe_rate"], "g"),
            shown(best, ".4f"),
            shown(sweep["best_rate"], "g"),
            ranged(sweep["sensitivity"], ".4f"),
        )
    return table


def ranged(found: Results | None, form: str, unit: str = "") -> str:
    """Such as 0.0105 (0.0089 to 0.0124); or at least 2.00×."""
    if found is None or found["value"] is None:
        return NOTHING
    interval = "" if found["low"] is None else f" ({found['low']:{form}} to {found['high']:{form}})"
    bound = f"{found['bound']} " if found.get("bound") else ""
    return f"{bound}{found['value']:{form}}{unit}{interval}"


def shown(value: float | None, form: str) -> str:
    return NOTHING if value is None else f"{value:{form}}"
