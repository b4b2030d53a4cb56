"""How the results of a comparison look: a table of the arms, a sentence for each method, and what to beware of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .console import NOTHING, natural_width, print_line

Results = Mapping[str, Any]


def print_results(results: Results) -> None:
    settings = list(dict.fromkeys(arm["setting"] for arm in results["arms"]))
    for setting in settings:
        print_line(f"{results['recipe']}, {setting}, {results['steps']:,} steps", style="bold")
        print_table(setting_table(results, setting))
        for line in quality_lines([arm for arm in results["arms"] if arm["setting"] == setting]):
            print_line(line)
        for pair in results["comparisons"]:
            if pair["setting"] == setting and pair["pairs"]:
                print_line(verdict_line(pair))
    if results["rate_sensitivity"]:
        print_line("sensitivity to the learning rate: the loss given away, on average, by not knowing the best", "bold")
        print_table(rate_table(results["rate_sensitivity"]))
    for warning in results["warnings"]:
        print_line(f"warning: {warning}", style="yellow")


def verdict_line(pair: Results) -> str:
    """The sentence about the speed-up, and the paired test of the final losses."""
    loss = pair["final_loss"]
    if loss is None or loss["p"] is None:
        return f"- {pair['sentence']}"
    difference = f"{loss['difference']:+.4f} ± {(loss['high'] - loss['low']) / 2:.4f} (paired t, p = {loss['p']:.2g})"
    return f"- {pair['sentence']} Final validation loss {difference}."


def setting_table(results: Results, setting: str) -> Table:
    arms = [arm for arm in results["arms"] if arm["setting"] == setting]
    pairs = {pair["arm"]: pair for pair in results["comparisons"]}
    name = next((arm["fd_curve"]["name"] for arm in arms if arm["fd_curve"]), None)
    headers = ["method", "validation loss", *([name] if name else []), "speed-up, steps", "speed-up, seconds"]
    table = make_table([*headers, "oscillation:\nfeatures", "\ngradients", "diverged"])
    for arm in arms:
        pair = pairs.get(arm["id"], {})
        oscillation, diverged = arm["oscillation"], arm["diverged"]
        table.add_row(
            Text(arm["label"]),
            with_interval(arm["final_loss"], ".4f"),
            *([with_interval(arm["final_fd"], ".1f")] if name else []),
            with_range(pair.get("speedup_steps")),
            with_range(pair.get("speedup_seconds")),
            with_interval(oscillation["feature"], ".1%"),
            with_interval(oscillation["gradient"], ".1%"),
            f"{diverged['count']} of {diverged['of']}",
        )
    return table


def quality_lines(arms: Sequence[Results]) -> list[str]:
    """What training, and averaging the weights, did for the distance."""
    raw = [f"{arm['label']} {number(arm['final_fd_raw']['value'], '.0f')}" for arm in arms if arm["final_fd_raw"]]
    lines = [fall_line(*steps, alike) for steps, alike in evaluated_alike(arms).items()]
    if raw:
        lines.append(f"at the end with the last weights instead of averaged ones: {', '.join(raw)}")
    return lines


def evaluated_alike(arms: Sequence[Results]) -> dict[tuple[int, int], list[Results]]:
    """The arms with several evaluations, by the steps of the first and of the last."""
    found: dict[tuple[int, int], list[Results]] = {}
    for arm in arms:
        steps = arm["fd_curve"]["steps"] if arm["fd_curve"] else []
        if len(steps) > 1:
            found.setdefault((steps[0], steps[-1]), []).append(arm)
    return found


def fall_line(first: int, last: int, arms: Sequence[Results]) -> str:
    shown = ", ".join(f"{arm['label']} {both_ends(arm['fd_curve']['mean'])}" for arm in arms)
    return f"{arms[0]['fd_curve']['name']} from step {first:,} to {last:,}: {shown}"


def both_ends(values: Sequence[float | None]) -> str:
    """
    >>> both_ends([250.2, 120.0, 87.1])
    '250 → 87'
    """
    return f"{number(values[0], '.0f')} → {number(values[-1], '.0f')}"


def rate_table(sweeps: Sequence[Results]) -> Table:
    rates = list(dict.fromkeys(rate for sweep in sweeps for rate in sweep["rates"]))
    table = make_table(["method", *(f"lr {rate:g}" for rate in rates), "sensitivity", "largest stable"])
    for sweep in sweeps:
        losses = dict(zip(sweep["rates"], sweep["losses"], strict=True))
        setting = f"{sweep['label']}, depth {sweep['depth']}, batch {sweep['batch']}"
        cells = [number(losses.get(rate), ".4f", "diverged") for rate in rates]
        stable = number(sweep["largest_stable_rate"], "g")
        table.add_row(Text(setting), *cells, with_range(sweep["sensitivity"], ".4f", ""), stable)
    return table


def make_table(headers: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place else "left", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, natural_width(table))
    console.print(table)


def with_interval(found: Results | None, form: str) -> str:
    """Such as 0.1234 ± 0.0010."""
    if found is None or found["value"] is None:
        return NOTHING
    half = "" if found["low"] is None else f" ± {(found['high'] - found['low']) / 2:{form}}"
    return f"{found['value']:{form}}{half}"


def with_range(found: Results | None, form: str = ".2f", unit: str = "×") -> str:
    """Such as 1.52× (1.31 to 1.77), where an interval is not symmetric; or at least 16.00×."""
    if found is None or found["value"] is None:
        return NOTHING
    interval = "" if found["low"] is None else f" ({found['low']:{form}} to {found['high']:{form}})"
    bound = f"{found['bound']} " if found.get("bound") else ""
    return f"{bound}{found['value']:{form}}{unit}{interval}"


def number(value: float | None, form: str, missing: str = NOTHING) -> str:
    return missing if value is None else f"{value:{form}}"
