"""The command that trains: train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import is_first_process, user_errors
from .options import Overrides

if TYPE_CHECKING:
    from ..config import Config
    from ..training import TrainResult

Recipe = Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="A name, or the path of a .yaml file; digits.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder; runs/<recipe>-<method> if not given.")]
Resume = Annotated[str, typer.Option(metavar="auto|never|PATH", help="Where to begin; PATH is a checkpoint.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop; nothing is written.")]


def train(
    recipe: Recipe = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = "auto",
    dry_run: DryRun = False,
) -> None:
    """Train a recipe. The same command again, or --out alone, resumes a run that was stopped.

    The run's folder holds the resolved recipe, versions, metrics.jsonl, checkpoints and samples. Ctrl-C or SIGTERM: the
    step is finished and saved, and the exit code is 130 or 143; a second one ends the process at once. Exit code 2: the
    run could not be started or saved, and one line says why.

    \b
    Examples:
      scalelong train
      scalelong train digits --set scaling.method=ls --set optim.lr=1e-3
      scalelong train my-recipe.yaml --out runs/mine --dry-run
      scalelong train --out runs/mine
      torchrun --nproc-per-node 8 -m scalelong train cifar10-tiny-uvit
      accelerate launch -m scalelong train cifar10-tiny-uvit
    """
    with user_errors():
        config = choose_recipe(recipe, overrides or [], out)
        folder = out or Path("runs") / f"{config.name}-{config.scaling.method}"
        if dry_run:
            show_plan(config, folder, resume)
            return
        from ..training import train as run_training
        from .display import choose_display

        result = run_training(config, folder, resume, display=choose_display())
    if is_first_process():
        typer.echo(describe_end(result))
    if result.signal is not None:
        sys.exit(128 + result.signal)


def choose_recipe(recipe: str | None, overrides: list[str], out: Path | None) -> Config:
    """The recipe that was named; else that of the run in the folder; else digits."""
    from ..config import load_recipe
    from ..runs import Run

    if recipe is None and out is not None and Run(out).exists:
        return load_recipe(Run(out).config_file, overrides)
    return load_recipe(recipe or "digits", overrides)


def show_plan(config: Config, folder: Path, resume: str) -> None:
    from ..config import summarise, to_yaml
    from ..runs import Run, find_resume_point

    start, summary = find_resume_point(Run(folder), config, resume), summarise(config)
    typer.echo(to_yaml(config), nl=False)
    typer.echo(
        f"# {summary.parameters:,} parameters, {summary.data}, steps {start.step} to {summary.steps}, in {folder}"
    )


def describe_end(result: TrainResult) -> str:
    """How a run ended, and the command that comes next."""
    again = f"scalelong train --out {result.folder}"
    if not result.finished:
        return f"stopped and saved at step {result.step} of {result.steps}. To resume: {again}"
    if result.trained:
        return f"finished: {result.folder}. For more samples: scalelong sample {result.folder}"
    return (
        f"{result.folder} is finished: step {result.step} of {result.steps}; no step was left to train. "
        f"To train longer: {again} --set training.steps={2 * result.steps}"
    )
