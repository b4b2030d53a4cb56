"""The command that computes once what training only reads: prepare."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import shown_progress, user_errors
from .options import Overrides

if TYPE_CHECKING:
    from ..data import Progress
    from ..data.prepare import Job, Prepared
    from ..utils.process import Rank

# Enough to see what is wrong; the index has them all.
NAMED = 20

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A name, or the path of a .yaml file.")]
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
    with user_errors():
        job, rank = plan_job(recipe, overrides or [], out)
        if dry_run:
            encoders = [job.text and job.text.encoder, job.latents and job.latents.autoencoder]
            names = ", ".join(filter(None, encoders)) or "decoding"
            typer.echo(f"{job.data.source} by {names}, to {job.folder}")
            return
    with user_errors(), shown_progress() as show:
        from ..data.prepare import prepare as run_job

        progress: Progress = lambda done, total: show("rows", done, total)  # noqa: E731
        prepared = run_job(job, rank, progress=progress)
    if prepared is not None:
        report(prepared, training_command(recipe, overrides or [], out))


def plan_job(recipe: str, overrides: list[str], out: Path | None) -> tuple[Job, Rank]:
    """What is to be done, and which part of it is this process's."""
    from ..config import load_recipe
    from ..config.inputs import prepared_place
    from ..data.prepare import Job
    from ..utils.process import Rank

    config = load_recipe(recipe, overrides)
    if out is not None and config.text is None and config.latents is None:
        raise ValueError("--out: this recipe's images go to the image cache; SCALELONG_CACHE says where that is")
    classes = None if config.labels is None else config.labels.classes
    return Job(config.data, config.text, config.latents, out or prepared_place(config), classes), Rank.here()


def training_command(recipe: str, overrides: list[str], out: Path | None) -> str:
    """The command that trains on what was prepared: with other settings it would look for another folder."""
    settings = [*overrides, *([] if out is None else [f"data.prepared={out}"])]
    return shlex.join(["scalelong", "train", recipe, *(word for setting in settings for word in ("--set", setting))])


def report(prepared: Prepared, command: str) -> None:
    from ..utils.atomic import human_size

    rows = prepared.rows
    if broken := prepared.broken.found:
        names = "".join(f"\n  {name}: {reason}" for name, reason in broken[:NAMED])
        more = len(broken) - NAMED
        typer.echo(f"skipped, because they could not be read: {len(broken)} images{names}")
        if more > 0:
            typer.echo(f"  and {more} more, which index.json names")
    typer.echo(
        f"finished: {prepared.folder}, {rows['train']} rows to train on and {rows['validation']} for validation, "
        f"{human_size(prepared.bytes)}. To train: {command}"
    )
