"""The command that hands a trained run to other libraries: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import user_errors
from .options import RunFolder, Weights, Which

To = Annotated[Literal["diffusers", "uvit"], typer.Option(help="Who is to load it.")]
Out = Annotated[Path | None, typer.Option(help="The folder to write; inside the run's if not given.")]
Push = Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the Hugging Face hub as well.")]
Private = Annotated[bool, typer.Option("--private", help="Keep the uploaded repository private.")]


def export(
    run: RunFolder,
    to: To,
    out: Out = None,
    weights: Weights = "ema",
    checkpoint: Which = "last",
    push: Push = None,
    private: Private = False,
) -> None:
    """Write a trained run for diffusers or for the public U-ViT code.

    Constants are folded into the weights where that is exact; else the folder's README has the lines that scale the
    skips again after loading.

    \b
    Examples:
      scalelong export runs/cifar10-tiny-unet-cs --to diffusers
      scalelong export runs/digits-cs --to uvit --out digits-uvit
      scalelong export runs/cifar10-tiny-unet-cs --to diffusers --push me/cifar10-cs
    """
    with user_errors():
        from ..runs.export import export_run
        from ..runs.export import push as upload

        done = export_run(run, to, out, weights=weights, checkpoint=checkpoint)
        typer.echo(f"written: {done.folder}")
        if not done.fused:
            typer.echo(f"the scaling is beside the weights, not in them: {done.reason}; its README says how to load it")
        if push is not None:
            typer.echo(f"uploaded: {upload(done.folder, push, private=private)}")
