"""The command that hands a trained run to other libraries: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .training import Which, run_errors

EXPORT = """Write a trained run as a folder that diffusers, or the public U-ViT code, loads.

Constants are folded into the weights where that is exact; else the folder's README has the lines that scale the skips
again after loading.

\b
Examples:
  scalelong export runs/cifar10-tiny-unet-cs --to diffusers
  scalelong export runs/digits-cs --to uvit --out digits-uvit
  scalelong export runs/cifar10-tiny-unet-cs --to diffusers --push me/cifar10-cs"""

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
To = Annotated[str, typer.Option(metavar="diffusers|uvit", help="Who is to load it.")]
Out = Annotated[Path | None, typer.Option(help="The folder to write; inside the run's if not given.")]
Weights = Annotated[str, typer.Option(metavar="ema|raw", help="The EMA weights, or those of the last step.")]
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
    with run_errors():
        if weights not in ("ema", "raw"):
            raise ValueError(f"--weights is ema or raw, not {weights!r}")
        from ..runs.export import export_run
        from ..runs.export import push as upload

        target: Any = to
        done = export_run(run, target, out, weights="ema" if weights == "ema" else "raw", checkpoint=checkpoint)
    typer.echo(f"written: {done.folder}")
    if not done.fused:
        typer.echo(f"the scaling is beside the weights, not in them: {done.reason}; its README says how to load it")
    if push is not None:
        with run_errors():
            typer.echo(f"uploaded: {upload(done.folder, push, private=private)}")
