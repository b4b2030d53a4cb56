"""How results look: in a terminal within its width and in colour, in a pipe one line for each thing and plain."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from .inspecting import InspectedSkip, Inspection, percent

NOTHING = "–"


def print_inspection(name: str, inspection: Inspection) -> None:
    print_line(model_line(name, inspection), style="bold")
    print_line(method_line(inspection))
    print_table(inspection)
    for caution in inspection.warnings:
        print_line(f"warning: {caution.message}", style="yellow")


def print_line(line: str, style: str = "") -> None:
    console = Console(highlight=False)
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


def model_line(name: str, inspection: Inspection) -> str:
    skips = count(inspection.num_skips, "long skip")
    return f"{name}: {inspection.model}, {count(inspection.parameters, 'parameter')}, N = {skips}"


def method_line(inspection: Inspection) -> str:
    """The method with its options, what it adds, and the sum that the paper's rule for kappa is about (Section 4.1)."""
    total, added = inspection.sum_of_squares, inspection.added_parameters
    parts = [inspection.method]
    parts += [f"{name} = {show(value)}" for name, value in inspection.options.items() if value is not None]
    parts += ["after the norm"] if inspection.where == "after-norm" else []
    parts += [count(added, "added parameter")] if added else []
    parts += [] if total is None else [f"Σκ_i² = {show(total)} (the paper aims at 1.22 to 5)"]
    return ", ".join(parts)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def print_table(inspection: Inspection) -> None:
    """One line per skip, or in a terminal too narrow for it one line per reader of a skip; values are never cut."""
    console = Console(highlight=False)
    table = skip_table(inspection, gap=2, separator=" + ")
    if console.is_terminal and natural_width(table) > console.width:
        table = skip_table(inspection, gap=1, separator=" +\n")
    console.width = max(console.width, natural_width(table))
    console.print(table)


def natural_width(table: Table) -> int:
    return Console(width=10_000).measure(table).maximum


def skip_table(inspection: Inspection, *, gap: int, separator: str) -> Table:
    learned = inspection.added_parameters > 0 and inspection.sum_of_squares is not None
    columns: dict[str, JustifyMethod] = {
        "i": "right",
        "consumer": "left",
        "entry": "left",
        "width": "right",
        "followed by": "left",
        "κ_i at\nthe start" if learned else "κ_i": "right",
        "survives\nthe norm": "right",
    }
    # The box itself puts one space between columns.
    table = Table(box=SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
    for header, justify in columns.items():
        table.add_column(header, justify=justify, no_wrap=True)
    for skip in inspection.skips:
        table.add_row(*(Text(cell) for cell in cells(skip, separator)))
    return table


def cells(skip: InspectedSkip, separator: str) -> list[str]:
    follows = separator.join(skip.follows) or ("a norm" if skip.absorbed else NOTHING)
    coefficient = "by input" if skip.coefficient is None else show(skip.coefficient)
    share = NOTHING if skip.share is None else percent(skip.share)
    return [str(skip.index), skip.consumer, skip.entry, str(skip.width), follows, coefficient, share]
