"""The application: its commands, each a function in a file of its own that parses, calls and prints."""

from __future__ import annotations

import sys
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from .. import __version__
from . import comparing, evaluate, export, inspect, kappa, preparing, recipes, report, sample, theory, train
from .console import fail

ABOUT = f"""Train diffusion UNets stably by scaling their long skip connections.

{inspect.EXAMPLES}
  scalelong train digits --set scaling.method=ls
  scalelong sample runs/digits-ls"""

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


app.command(help=inspect.INSPECT)(inspect.inspect)
app.command(help=train.TRAIN)(train.train)
app.command(help=preparing.PREPARE)(preparing.prepare)
app.command(help=sample.SAMPLE)(sample.sample)
app.command(help=recipes.RECIPES)(recipes.recipes)
app.command(help=export.EXPORT)(export.export)
app.command(help=evaluate.STATS)(evaluate.stats)
app.command(help=evaluate.EVALUATE)(evaluate.evaluate)
app.command(help=comparing.COMPARE)(comparing.compare)
app.command(help=theory.THEORY)(theory.theory)
app.command(help=kappa.KAPPA)(kappa.kappa)
app.command(help=report.REPORT)(report.report)
