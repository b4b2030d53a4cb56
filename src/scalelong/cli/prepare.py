"""The command that computes once what training only reads: prepare."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import printable
from .console import Overrides, Recipe, print_now, set_options, shown_progress

if TYPE_CHECKING:
    from ..data.decode import BrokenImages

# Enough to see what is wrong; the index has them all.
NAMED = 20

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be computed, and stop.")]
Out = Annotated[Path | None, typer.Option(help="The folder, instead of data.prepared.")]


def prepare(recipe: Recipe, overrides: Overrides = None, out: Out = None, dry_run: DryRun = False) -> None:
    """Compute once what training only reads: latents, text, images.

    Recipes with text: or latents: need it; their files go to data.prepared, which is prepared/<recipe>-<hash> unless
    the recipe says otherwise. For other recipes it fills the image cache, from which training then starts at once.

    The files are blocks of rows, each with a checksum. The same command resumes after a kill, and makes anew what is
    damaged; neither can be seen in the files, nor can the number of processes, which torchrun starts. Images that
    cannot be read are skipped and named; more than 1 % of them stop it.

    \b
    Examples:
      scalelong prepare flickr-tiny
      scalelong prepare coco-uvit-s2 --set data.source=./coco --out /scratch/coco
      torchrun --nproc-per-node 8 -m scalelong prepare coco-uvit-s2
    """
    from ..config import load_recipe
    from ..config.build import prepared_place
    from ..data.prepare import Job
    from ..data.prepare import prepare as run_job
    from ..utils.atomic import human_size
    from ..utils.runtime import Rank
    from ..utils.team import together

    config = load_recipe(recipe, overrides or [])
    data, text, latents = config.data, config.text, config.latents
    if out is not None and text is None and latents is None:
        raise ValueError("--out: this recipe's images go to the image cache; SCALELONG_CACHE says where that is")
    folder = out or prepared_place(config)
    if dry_run:
        encoders = [text and text.encoder, latents and latents.autoencoder]
        print_now(f"{data.source} by {', '.join(filter(None, encoders)) or 'decoding'}, to {folder}")
        return
    job = Job(data, text, latents, folder, None if config.labels is None else config.labels.classes)
    with together(Rank.here()) as rank, shown_progress() as show:
        prepared = run_job(job, rank, progress=lambda done, total: show("rows", done, total))
    if prepared is None:
        return
    print_broken(prepared.broken)
    # With other settings training would look for another folder.
    settings = [*(overrides or []), *([] if out is None else [f"data.prepared={out}"])]
    typer.echo(
        f"finished: {prepared.folder}, {prepared.rows['train']} rows to train on and {prepared.rows['validation']} for "
        f"validation, {human_size(prepared.bytes)}. "
        f"To train: {shlex.join(['scalelong', 'train', recipe, *set_options(settings)])}"
    )


def print_broken(broken: BrokenImages) -> None:
    """The images that could not be read, if there are any."""
    if found := broken.found:
        typer.echo(f"skipped, because they could not be read: {len(found)} images")
        for name, reason in found[:NAMED]:
            typer.echo(printable(f"  {name}: {reason}"))
        if len(found) > NAMED:
            typer.echo(f"  and {len(found) - NAMED} more, which index.json names")
