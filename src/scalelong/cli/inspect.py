"""The command that shows the long skips of a model: inspect."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import METHODS
from ..models import preset_names
from .console import NOTHING, count, make_table, natural_width, print_line, print_table, user_errors
from .inspection import InspectedSkip, Inspection, inspect_model, percent
from .loading import load_model

MODEL = f"A preset ({', '.join(preset_names())}), a diffusers folder, or an id on the Hub."


def inspect(
    model: Annotated[str, typer.Argument(metavar="PRESET|PATH|HUB_ID", help=MODEL)],
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "cs",
    kappa: Annotated[float | None, typer.Option(help="κ of cs and cs-reversed; 0.7 if not given.")] = None,
    value: Annotated[float | None, typer.Option(help="The constant of uniform; 1/√2 if not given.")] = None,
    init: Annotated[float | None, typer.Option(help="Where a learned method starts.")] = None,
    where: Annotated[str, typer.Option(metavar="input|after-norm", help="What is scaled.")] = "input",
    json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of the table.")] = False,
) -> None:
    """Show the long skips of a model and what a scaling method does.

    No weights are loaded. Warns about constants that a norm cancels, about the norm's eps, and about fp16.

    \b
    Examples:
      scalelong inspect cifar10-uvit-s2
      scalelong inspect cifar10-unet --method cs --kappa 0.5
      scalelong inspect google/ddpm-cifar10-32 --where after-norm
      scalelong inspect ./my-pipeline --method ls --json
    """
    given = {"kappa": kappa, "value": value, "init": init}
    options = {name: number for name, number in given.items() if number is not None}
    with user_errors():
        inspection = inspect_model(load_model(model), method, where=where, **options)
    if json:
        typer.echo(json_format.dumps(asdict(inspection), indent=2))
    else:
        print_inspection(model, inspection)


def print_inspection(name: str, inspection: Inspection) -> None:
    parameters, skips = count(inspection.parameters, "parameter"), count(inspection.num_skips, "long skip")
    print_line(f"{name}: {inspection.model}, {parameters}, N = {skips}", style="bold")
    print_line(method_line(inspection))
    # One line per skip, or in a terminal too narrow for it one line per reader of a skip.
    table, console = skip_table(inspection, gap=2, separator=" + "), Console()
    if console.is_terminal and natural_width(table) > console.width:
        table = skip_table(inspection, gap=1, separator=" +\n")
    print_table(table)
    for caution in inspection.warnings:
        print_line(f"warning: {caution.message}", style="yellow")


def method_line(inspection: Inspection) -> str:
    """The method with its options, what it adds, and the sum that the paper's rule for kappa is about (Section 4.1)."""
    total, added = inspection.sum_of_squares, inspection.added_parameters
    parts = [inspection.method]
    parts += [f"{name} = {show(value)}" for name, value in inspection.options.items() if value is not None]
    parts += ["after the norm"] if inspection.where == "after-norm" else []
    parts += [count(added, "added parameter")] if added else []
    parts += [] if total is None else [f"Σκ_i² = {show(total)} (the paper aims at 1.22 to 5)"]
    return ", ".join(parts)


def show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def skip_table(inspection: Inspection, *, gap: int, separator: str) -> Table:
    learned = inspection.added_parameters > 0 and inspection.sum_of_squares is not None
    coefficient = ">κ_i at\nthe start" if learned else ">κ_i"
    headers = (">i", "consumer", "entry", ">width", "followed by", coefficient, ">survives\nthe norm")
    table = make_table(*headers, gap=gap)
    for skip in inspection.skips:
        table.add_row(*map(Text, cells(skip, separator)))
    return table


def cells(skip: InspectedSkip, separator: str) -> list[str]:
    follows = separator.join(skip.follows) or ("a norm" if skip.absorbed else NOTHING)
    coefficient = "by input" if skip.coefficient is None else show(skip.coefficient)
    share = NOTHING if skip.share is None else percent(skip.share)
    return [str(skip.index), skip.consumer, skip.entry, str(skip.width), follows, coefficient, share]
