"""The commands that train and that use a trained run: train, sample, recipes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..diffusion import SAMPLERS
from .errors import fail, is_first_process, needs_extra, user_errors

if TYPE_CHECKING:
    from ..config import Config
    from ..training import Result

TRAIN = """Train a recipe; the same command again, or --out alone, goes on where the run was stopped.

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
  accelerate launch -m scalelong train cifar10-tiny-uvit"""

SAMPLE = """Draw images from a trained run: one PNG each, and a grid of the first 256.

Each image has a seed and noise of its own. Images that are there are not drawn again: the same command goes on where it
was interrupted, and a larger -n adds to the folder. Several processes share the work. At the same --batch and number of
threads the files are the same; with others they agree to rounding.

\b
Examples:
  scalelong sample runs/digits-cs
  scalelong sample runs/digits-cs -n 16 --sampler unipc --steps 25 --seed 7 --weights raw
  scalelong sample runs/digits-cs --checkpoint best
  torchrun --nproc-per-node 8 -m scalelong sample runs/cifar10-uvit-s2-cs -n 50000 --batch 256 --compile
  scalelong sample runs/cifar10-tiny-class-cs --class 3 --guidance 3
  scalelong sample runs/flickr-tiny-cs -n 16 --prompt 'a dog runs over the grass'"""

RECIPES = """List the recipes that come with scalelong: parameters, data and steps.

\b
Example:
  scalelong recipes"""

SAMPLER = f"The solver, one of {', '.join(SAMPLERS)}; else the recipe's."

Recipe = Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="A name, or the path of a .yaml file; digits.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a recipe's value.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder; runs/<recipe>-<method> if not given.")]
Resume = Annotated[str, typer.Option(metavar="auto|never|PATH", help="Where to begin; PATH is a checkpoint.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile first, once per size of batch; faster then.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop; nothing is written.")]
Weights = Annotated[str, typer.Option(metavar="ema|raw", help="The EMA weights, or those of the last step.")]
Which = Annotated[str, typer.Option("--checkpoint", metavar="last|best|STEP", help="best = lowest validation loss.")]
# Image k has the seed `seed + k`, and generators take those below 2^64.
LARGEST_SEED = 2**63


@contextmanager
def run_errors() -> Iterator[None]:
    """What may go wrong in a run without being a mistake in the program: one line."""
    with needs_extra("train"):
        from ..guard.nonfinite import TrainingDiverged
        from ..runs import CheckpointError
    try:
        with user_errors():
            yield
    except (CheckpointError, TrainingDiverged) as error:
        fail(str(error))


def train(
    recipe: Recipe = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = "auto",
    dry_run: DryRun = False,
) -> None:
    with run_errors():
        config = choose_recipe(recipe, overrides or [], out)
        folder = out or Path("runs") / f"{config.name}-{config.scaling.method}"
        if dry_run:
            show_plan(config, folder, resume)
            return
        from ..training import train as run_training
        from .display import choose_display

        monitor = None
        if config.training.monitor_every is not None:
            from ..monitor.monitor import SkipMonitor as monitor
        evaluate = None
        if config.evaluation.every is not None:
            evaluate = open_evaluator
        result = run_training(config, folder, resume, display=choose_display(), monitor=monitor, evaluate=evaluate)
    report(result)
    if result.signal is not None:
        sys.exit(128 + result.signal)


def open_evaluator(*arguments: Any, **options: Any) -> Any:
    """An evaluator of images, whose statistics of the dataset may take their time."""
    from ..evaluation import Evaluator
    from .progress import shown_progress

    with shown_progress() as show:
        return Evaluator.open(*arguments, **options, progress=show)


def choose_recipe(recipe: str | None, overrides: list[str], out: Path | None) -> Config:
    """The recipe that was named; else that of the run in the folder; else digits."""
    from ..config import load_recipe
    from ..runs import Run

    if recipe is None and out is not None and Run(out).exists:
        return load_recipe(Run(out).config_file, overrides)
    return load_recipe(recipe or "digits", overrides)


def show_plan(config: Config, folder: Path, resume: str) -> None:
    from ..config import summarise, to_yaml
    from ..runs import Run, find_start

    start, summary = find_start(Run(folder), config, resume), summarise(config)
    typer.echo(to_yaml(config), nl=False)
    typer.echo(
        f"# {summary.parameters:,} parameters, {summary.data}, steps {start.step} to {summary.steps}, in {folder}"
    )


def report(result: Result) -> None:
    if not is_first_process():
        return
    again = f"scalelong train --out {result.folder}"
    if result.finished and not result.trained:
        typer.echo(
            f"{result.folder} is finished: step {result.step} of {result.steps}; no step was left to train. "
            f"To train longer: {again} --set training.steps={2 * result.steps}"
        )
    elif result.finished:
        typer.echo(f"finished: {result.folder}. To draw more samples: scalelong sample {result.folder}")
    else:
        typer.echo(f"stopped and saved at step {result.step} of {result.steps}. To go on: {again}")


def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    count: Annotated[int, typer.Option("-n", min=1, help="How many images.")] = 64,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the solver; else the recipe's.")] = None,
    sampler: Annotated[str | None, typer.Option(help=SAMPLER)] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="1 = the condition as it is, more = stronger.")] = None,
    label: Annotated[int | None, typer.Option("--class", min=0, help="Draw this class only.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Draw what this text says.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="The first image's seed; the next has the next.")
    ] = 0,
    weights: Weights = "ema",
    checkpoint: Which = "last",
    batch: Annotated[int, typer.Option(min=1, help="Images at once; other numbers round differently.")] = 64,
    compile: Compile = False,
) -> None:
    with run_errors():
        if weights not in ("ema", "raw"):
            raise ValueError(f"--weights is ema or raw, not {weights!r}")
        from ..sampling import SampleRequest, sample_run
        from .progress import shown_progress

        with shown_progress() as show:
            folder = sample_run(
                run,
                count,
                steps=steps,
                sampler=sampler,
                guidance=guidance,
                request=SampleRequest(label, prompt),
                seed=seed,
                weights="ema" if weights == "ema" else "raw",
                checkpoint=checkpoint,
                batch=batch,
                compile=compile,
                progress=lambda done, total: show("images", done, total),
            )
    if is_first_process():
        there = sum(path.stem.isdigit() for path in folder.glob("*.png"))
        typer.echo(f"{there} images and grid.png: {folder}")


def recipes() -> None:
    with run_errors():
        from ..config import recipe_summaries
        from .recipe_table import print_recipes

        print_recipes(recipe_summaries())
