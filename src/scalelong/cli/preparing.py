"""The command that computes latents and text features beforehand: prepare."""

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
    from ..utils.distributed import Rank

# Enough to see what is wrong; the index has them all.
NAMED = 20

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A name, or the path of a .yaml file.")]
Out = Annotated[Path | None, typer.Option(help="The folder, instead of data.prepared.")]
Processes = Annotated[int, typer.Option(min=1, help="How many work on it; each computes with one core, or one GPU.")]


def prepare(recipe: Recipe, overrides: Overrides = None, out: Out = None, processes: Processes = 1) -> None:
    """Compute the latents and text features of a recipe once.

    Training then only reads them. They are written in shards, each with a checksum, to data.prepared, which is
    prepared/<recipe>-<hash> unless the recipe says otherwise. The same command resumes after a kill, and makes anew
    what is damaged; neither can be seen in the files, nor can the number of processes. Images that cannot be read are
    skipped and named; more than 1 % of them stop it.

    \b
    Examples:
      scalelong prepare flickr-tiny --processes 2
      scalelong prepare coco-uvit-s2 --set data.source=./coco --out /scratch/coco
      torchrun --nproc-per-node 8 -m scalelong prepare coco-uvit-s2
    """
    with user_errors():
        job, rank = plan_job(recipe, overrides or [], out)
        if processes > 1 and rank.world > 1:
            raise ValueError("a launcher has started several processes already: leave out --processes")
    with user_errors(), shown_progress() as show:
        from ..data.prepare import prepare as run_job
        from ..data.processes import prepare_together

        progress: Progress = lambda done, total: show("rows", done, total)  # noqa: E731
        if processes > 1:
            prepared = prepare_together(job, processes, progress=progress)
        else:
            prepared = run_job(job, rank, progress=progress)
    if prepared is not None:
        report(prepared, training_command(recipe, overrides or [], out))


def plan_job(recipe: str, overrides: list[str], out: Path | None) -> tuple[Job, Rank]:
    """What is to be done, and which part of it is this process's."""
    from ..config import load_recipe
    from ..data.prepare import Job
    from ..data.prepared import prepared_folder
    from ..utils.distributed import Rank

    config = load_recipe(recipe, overrides)
    folder = out or prepared_folder(config.name, config.data, config.text, config.latents)
    classes = None if config.labels is None else config.labels.classes
    return Job(config.data, config.text, config.latents, folder, classes), Rank.here()


def training_command(recipe: str, overrides: list[str], out: Path | None) -> str:
    """The command that trains on what was prepared: with other settings it would look for another folder."""
    settings = [*overrides, *([] if out is None else [f"data.prepared={out}"])]
    return shlex.join(["scalelong", "train", recipe, *(word for setting in settings for word in ("--set", setting))])


def report(prepared: Prepared, command: str) -> None:
    from ..utils.atomic import human_size

    rows = prepared.rows
    if prepared.broken:
        names = "".join(f"\n  {line}" for line in prepared.broken[:NAMED])
        more = len(prepared.broken) - NAMED
        typer.echo(f"skipped, because they could not be read: {len(prepared.broken)} images{names}")
        if more > 0:
            typer.echo(f"  and {more} more, which index.json names")
    typer.echo(
        f"finished: {prepared.folder}, {rows['train']} rows to train on and {rows['validation']} held out, "
        f"{human_size(prepared.bytes)}. To train: {command}"
    )
