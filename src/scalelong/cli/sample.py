"""The command that samples images from a run: sample."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import is_first_process, shown_progress, user_errors
from .options import Compile, Guidance, RunFolder, Sampler, Seed, Steps, Weights, Which


def sample(
    run: RunFolder,
    count: Annotated[int, typer.Option("-n", min=1, help="How many images.")] = 64,
    steps: Steps = None,
    sampler: Sampler = None,
    guidance: Guidance = None,
    label: Annotated[int | None, typer.Option("--class", min=0, help="Sample this class only.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Sample what this text says.")] = None,
    seed: Seed = 0,
    weights: Weights = "ema",
    checkpoint: Which = "last",
    batch: Annotated[int, typer.Option(min=1, help="Images at once; other numbers round differently.")] = 64,
    compile: Compile = False,
) -> None:
    """Sample images from a trained run.

    Writes one PNG for each, and a grid of the first 256. Each image has a seed and noise of its own. Images that are
    there are not sampled again: the same command resumes where it was interrupted, and a larger -n adds to the folder.
    Several processes share the work. At the same --batch and number of threads the files are the same; with others
    they agree to rounding.

    \b
    Examples:
      scalelong sample runs/digits-cs
      scalelong sample runs/digits-cs -n 16 --sampler unipc --steps 25 --seed 7 --weights raw
      scalelong sample runs/digits-cs --checkpoint best
      torchrun --nproc-per-node 8 -m scalelong sample runs/cifar10-uvit-s2-cs -n 50000 --batch 256 --compile
      scalelong sample runs/cifar10-tiny-class-cs --class 3 --guidance 3
      scalelong sample runs/flickr-tiny-cs -n 16 --prompt 'a dog runs over the grass'
    """
    with user_errors(), shown_progress() as show:
        from ..sampling import SampleRequest, sample_run

        folder = sample_run(
            run,
            count,
            steps=steps,
            sampler=sampler,
            guidance=guidance,
            request=SampleRequest(label, prompt),
            seed=seed,
            weights=weights,
            checkpoint=checkpoint,
            batch=batch,
            compile=compile,
            progress=lambda done, total: show("images", done, total),
        )
    if is_first_process():
        there = sum(path.stem.isdigit() for path in folder.glob("*.png"))
        typer.echo(f"{there} images and grid.png: {folder}")
