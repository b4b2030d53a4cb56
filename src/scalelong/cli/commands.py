"""The commands: each one a function of `app` that parses, calls and prints. A new command is one more function."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from .. import METHODS, __version__
from ..models import preset_names
from . import comparing, evaluating, exporting, preparing, reporting, stability, training
from .errors import fail, user_errors
from .inspecting import inspect_model
from .loading import load_model
from .tables import print_inspection

EXAMPLES = """\b
Examples:
  scalelong inspect cifar10-uvit-s2
  scalelong inspect cifar10-unet --method cs --kappa 0.5
  scalelong inspect google/ddpm-cifar10-32 --where after-norm
  scalelong inspect ./my-pipeline --method ls --json"""

ABOUT = f"""Train diffusion UNets stably by scaling their long skip connections.

{EXAMPLES}
  scalelong train digits --set scaling.method=ls
  scalelong sample runs/digits-ls"""

INSPECT = f"""Show the long skips of a model and what a scaling method does to them; no weights are loaded.

Warns about constants that a norm cancels, about the norm's eps, and about fp16.

{EXAMPLES}

Presets: {", ".join(preset_names())}."""

# The base of all errors in how a command was called, of which typer exports this subclass only.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


class OneLineErrors(TyperGroup):
    """Reports a command that was called wrongly in one line on stderr, with exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except UsageError as error:
            fail(error.format_message())
        sys.exit(code)


app = typer.Typer(cls=OneLineErrors, help=ABOUT, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def scalelong(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        typer.echo(f"scalelong {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(help=INSPECT)
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="PRESET|PATH|HUB_ID", help="A preset, a diffusers folder, or an id on the Hub.")
    ],
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "cs",
    kappa: Annotated[float | None, typer.Option(help="κ of cs and cs-reversed; 0.7 if not given.")] = None,
    value: Annotated[float | None, typer.Option(help="The constant of uniform; 1/√2 if not given.")] = None,
    init: Annotated[float | None, typer.Option(help="Where a learned method starts.")] = None,
    where: Annotated[str, typer.Option(metavar="input|after-norm", help="What is scaled.")] = "input",
    json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of the table.")] = False,
) -> None:
    given = {"kappa": kappa, "value": value, "init": init}
    options = {name: number for name, number in given.items() if number is not None}
    with user_errors():
        inspection = inspect_model(load_model(model), method, where=where, **options)
    if json:
        typer.echo(json_format.dumps(asdict(inspection), indent=2))
    else:
        print_inspection(model, inspection)


app.command(help=training.TRAIN)(training.train)
app.command(help=preparing.PREPARE)(preparing.prepare)
app.command(help=training.SAMPLE)(training.sample)
app.command(help=training.RECIPES)(training.recipes)
app.command(help=exporting.EXPORT)(exporting.export)
app.command(help=evaluating.STATS)(evaluating.stats)
app.command(help=evaluating.EVALUATE)(evaluating.evaluate)
app.command()(comparing.compare)
app.command(help=stability.THEORY)(stability.theory)
app.command(help=stability.KAPPA)(stability.kappa)
app.command(help=reporting.REPORT)(reporting.report)
