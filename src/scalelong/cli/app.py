"""The application: its commands, each a function that parses, calls and prints, in a file of cli."""

from __future__ import annotations

import typer

from .compare import compare
from .console import OneLineErrors, greet
from .edge import edge
from .evaluate import evaluate, stats
from .inspect import inspect
from .job import job
from .mup import coordcheck, transfer
from .prepare import prepare
from .probe import probe
from .report import report
from .theory import kappa, theory
from .train import export, recipes, sample, train
from .why import why

ABOUT = """Train diffusion UNets stably by scaling their long skip connections.

\b
Examples:
  scalelong inspect cifar10-uvit-s2
  scalelong inspect cifar10-unet --method cs --kappa 0.5
  scalelong inspect google/ddpm-cifar10-32 --where after-norm
  scalelong inspect ./my-pipeline --method ls --json
  scalelong train digits --set scaling.method=ls
  scalelong sample runs/digits-ls"""

app = typer.Typer(
    cls=OneLineErrors, help=ABOUT, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


app.callback(invoke_without_command=True)(greet)

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
    probe,
    compare,
    edge,
    why,
    coordcheck,
    transfer,
    job,
    theory,
    kappa,
    report,
):
    app.command()(command)
