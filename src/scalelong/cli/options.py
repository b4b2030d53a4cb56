"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..diffusion import SAMPLERS

# Image k has the seed `seed + k`, and generators take those below 2^64.
LARGEST_SEED = 2**63

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A name, or the path of a .yaml file.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a recipe's value.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]

Weights = Annotated[Literal["ema", "raw"], typer.Option(help="The EMA weights, or those of the last step.")]
Which = Annotated[str, typer.Option("--checkpoint", metavar="last|best|STEP", help="best = lowest validation loss.")]

Steps = Annotated[int | None, typer.Option(min=1, help="Steps of the solver; else the recipe's.")]
Sampler = Annotated[
    str | None, typer.Option(help=f"The solver, one of {', '.join(SAMPLERS)}; the recipe's if not given.")
]
Guidance = Annotated[
    float | None, typer.Option(min=0, help="1 = the condition as it is, more = stronger; else the recipe's.")
]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The first image's seed; the next has the next.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile first, once per size of batch; faster then.")]
