"""The commands that train, sample from a run and hand it to other libraries: train, recipes, sample and export."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from . import console

if TYPE_CHECKING:
    from ..config import Config
    from ..training import TrainResult


def train(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="A name, or a .yaml file; digits.")] = None,
    overrides: console.Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/<recipe>-<method> if not given.")] = None,
    resume: Annotated[str, typer.Option(metavar="auto|never|PATH", help="Where to begin.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe; write nothing.")] = False,
    allow_code: console.AllowCode = False,
    force: console.Force = False,
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
    from ..config import load_recipe, summarise
    from ..runs import Run

    if recipe is None and out is not None:
        if not Run(out).exists:
            raise ValueError(f"there is no run in {out} to resume: name a recipe to begin one (scalelong recipes)")
        config = Run(out).config(overrides or [], allow_code=allow_code)
    else:
        config = load_recipe(recipe or "digits", overrides or [])
    console.check_sizes([config], force=force)
    folder = out or Path("runs") / f"{config.name}-{config.scaling.method}"
    if dry_run:
        print_plan(config, folder, resume)
        return
    from ..training import train as run_training

    summary = summarise(config)
    display = console.choose_display(f"{config.name}: {summary.describe()}, {summary.steps:,} steps, in {folder}")
    result = run_training(config, folder, resume, display=display)
    if console.is_first_process():
        console.print_now(describe_end(result, config))
    if result.signal is not None:
        sys.exit(128 + result.signal)


def print_plan(config: Config, folder: Path, resume: str) -> None:
    from ..config import summarise, to_yaml
    from ..runs import Run, find_resume_point

    start, summary = find_resume_point(Run(folder), config, resume), summarise(config)
    typer.echo(to_yaml(config), nl=False)
    steps = f"steps {start.step} to {summary.steps}"
    console.print_now(f"# {summary.describe()}, {steps}, in {folder}")


def describe_end(result: TrainResult, config: Config) -> str:
    """How a run ended, and the command that comes next."""
    code = " --allow-code" if config.model.kind == "python" else ""
    folder = shlex.quote(str(result.folder)) + code
    again = f"scalelong train --out {folder}"
    if not result.finished:
        return f"stopped and saved at step {result.step} of {result.steps}. To resume: {again}"
    if result.trained:
        return f"finished: {result.folder}. For more samples: scalelong sample {folder}"
    return (
        f"{result.folder} is finished: step {result.step} of {result.steps}; no step was left to train. "
        f"To train longer: {again} --set training.steps={2 * result.steps}"
    )


def recipes() -> None:
    """List the recipes that come with scalelong.

    \b
    Example:
      scalelong recipes
    """
    from ..config import load_recipe, recipe_names, summarise

    table = console.make_table("recipe", ">parameters", "data", ">steps", "what it is")
    for name in recipe_names():
        row = summarise(load_recipe(name))
        table.add_row(*map(Text, (name, f"{row.parameters:,}", row.data, f"{row.steps:,}", row.description)))
    # In a terminal a long description is wrapped, in a pipe nothing is.
    table.columns[-1].no_wrap = False
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = console.natural_width(table)
    screen.print(table)


def sample(
    run: console.RunFolder,
    count: Annotated[int, typer.Option("-n", min=1, help="How many images.")] = 64,
    steps: console.Steps = None,
    sampler: console.Sampler = None,
    timestep_spacing: console.TimestepSpacing = None,
    variance: console.NoiseVariance = None,
    clip: console.Clip = None,
    guidance: console.Guidance = None,
    label: Annotated[int | None, typer.Option("--class", min=0, help="Sample this class only.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Sample what this text says.")] = None,
    seed: console.Seed = 0,
    weights: console.Weights = "ema",
    checkpoint: console.Which = "last",
    batch: Annotated[int, typer.Option(min=1, help="Images at once; other numbers round differently.")] = 64,
    compile: console.Compile = False,
    allow_code: console.AllowCode = False,
) -> None:
    """Sample images from a trained run.

    Writes one PNG for each, and a grid of the first 256. Each image has a seed and noise of its own; without --class or
    --prompt the classes or captions go by the image's number, not by its seed. Images that are there are not sampled
    again: the same command resumes where it was interrupted, and a larger -n adds to the folder. Several processes
    share the work. At the same --batch and number of threads the files are the same; with others they agree to
    rounding.

    \b
    Examples:
      scalelong sample runs/digits-cs
      scalelong sample runs/digits-cs -n 16 --sampler unipc --steps 25 --seed 7 --weights raw
      scalelong sample runs/digits-cs --checkpoint best
      torchrun --nproc-per-node 8 -m scalelong sample runs/cifar10-uvit-s2-cs -n 50000 --batch 256 --compile
      scalelong sample runs/cifar10-tiny-class-cs --class 3 --guidance 3
      scalelong sample runs/flickr-tiny-cs -n 16 --prompt 'a dog runs over the grass'
    """
    from ..sampling import SampleRequest, sample_run

    with console.shown_progress() as show:
        folder = sample_run(
            run,
            count,
            steps=steps,
            sampler=sampler,
            timestep_spacing=timestep_spacing,
            variance=variance,
            clip=clip,
            guidance=guidance,
            request=SampleRequest(label, prompt),
            seed=seed,
            weights=weights,
            checkpoint=checkpoint,
            batch=batch,
            compile=compile,
            allow_code=allow_code,
            progress=lambda done, total: show("images", done, total),
        )
    if console.is_first_process():
        there = sum(path.stem.isdigit() for path in folder.glob("*.png"))
        console.print_now(f"{there} images and grid.png: {folder}")


def export(
    run: console.RunFolder,
    to: Annotated[Literal["diffusers", "uvit", "safetensors"], typer.Option(help="Who is to load it.")],
    out: Annotated[Path | None, typer.Option("--out", help="What to write; else a folder in the run's.")] = None,
    weights: console.Weights = "ema",
    checkpoint: console.Which = "last",
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the Hub as well.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Keep the uploaded repository private.")] = False,
    allow_code: console.AllowCode = False,
) -> None:
    """Write a trained run for diffusers, for the public U-ViT code, or, if its network is your own, as safetensors.

    Constants are folded into the weights where that is exact; else only scalelong loads the folder, by the lines in its
    README.

    \b
    Examples:
      scalelong export runs/cifar10-tiny-unet-cs --to diffusers
      scalelong export runs/digits-cs --to uvit --out digits-uvit
      scalelong export runs/mine-cs --to safetensors --allow-code
      scalelong export runs/cifar10-tiny-unet-cs --to diffusers --push me/cifar10-cs
    """
    from ..runs import export as exports

    done = exports.export_run(run, to, out, weights=weights, checkpoint=checkpoint, allow_code=allow_code)
    console.print_now(f"written: {done.folder}")
    if not done.fused:
        typer.echo(f"the scaling could not be folded into the weights: {done.reason}; its README says how to load it")
    if push is not None:
        typer.echo(f"uploaded: {exports.push(done.folder, push, private=private)}")
