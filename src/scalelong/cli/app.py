"""The application: its commands, each a function that parses, calls and prints."""

from __future__ import annotations

import sys
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from .. import __version__
from .compare import compare
from .console import fail, report_defect, stop, user_errors
from .edge import edge
from .evaluate import evaluate, stats
from .inspect import inspect
from .prepare import prepare
from .report import report
from .theory import kappa, theory
from .train import export, recipes, sample, train

ABOUT = """Train diffusion UNets stably by scaling their long skip connections.

\b
Examples:
  scalelong inspect cifar10-uvit-s2
  scalelong inspect cifar10-unet --method cs --kappa 0.5
  scalelong inspect google/ddpm-cifar10-32 --where after-norm
  scalelong inspect ./my-pipeline --method ls --json
  scalelong train digits --set scaling.method=ls
  scalelong sample runs/digits-ls"""

# The base of all errors in how a command was called, of which typer exports this subclass only.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


class OneLineErrors(TyperGroup):
    """Reports what the user can put right in one line on stderr, with exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            with user_errors():
                code = super().main(*args, standalone_mode=False, **extra)
        except UsageError as error:
            fail(error.format_message())
        except Exception as error:
            report_defect(error)
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what typer makes of Ctrl-C differs between its versions, so it is not left to it."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, typer.Abort):
            stop()


app = typer.Typer(
    cls=OneLineErrors, help=ABOUT, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback(invoke_without_command=True)
def scalelong(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        typer.echo(f"scalelong {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# The docstring of a command is its help; this is the order in which `--help` lists them.
for command in (
    inspect,
    train,
    prepare,
    sample,
    recipes,
    export,
    stats,
    evaluate,
    compare,
    edge,
    theory,
    kappa,
    report,
):
    app.command()(command)
