"""The command that recommends κ for a recipe: kappa."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_line, user_errors
from .options import Overrides, Recipe

if TYPE_CHECKING:
    from ..kappa.advisor import KappaAdvice


def kappa(
    recipe: Recipe,
    overrides: Overrides = None,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw what was measured.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Recommend κ for a recipe from its data, schedule and network.

    Measures the size of the target beside the input, solves the band of κ for the network's number of skips, and
    measures the block gain. The last line compares values of the band by training.

    \b
    Examples:
      scalelong kappa digits
      scalelong kappa cifar10-tiny-uvit --set data.source=../shared/data/cifar10 --figure kappa.png
      scalelong kappa cifar10-tiny-unet --json
    """
    if figure is not None:
        with user_errors("report"):
            import matplotlib  # noqa: F401
    with user_errors():
        from ..config import load_recipe
        from ..kappa.advisor import draw_advice
        from ..kappa.recipe import advise_recipe

        config = load_recipe(recipe, overrides or [])
        advice = advise_recipe(config)
        if figure is not None:
            draw_advice(advice, figure)
    if json:
        typer.echo(json_format.dumps(advice.summary(), indent=2, ensure_ascii=False))
    else:
        print_advice(config.name, advice)
        print_line(f"to use it: {command_for(advice, recipe, overrides or [])}")
        print_line(f"to compare values of κ: {comparison_for(advice, recipe, overrides or [])}")


def print_advice(name: str, advice: KappaAdvice) -> None:
    where = "" if advice.where == "input" else f", where={advice.where}"
    band = f"band {advice.band.low:.3f} to {advice.band.high:.3f}"
    print_line(f"{name}: κ = {advice.kappa}{where} ({band})", style="bold")
    for reason in advice.reasons:
        print_line(f"- {reason}")


def command_for(advice: KappaAdvice, recipe: str, overrides: list[str]) -> str:
    """What trains the recipe, as it was measured, with the recommended κ."""
    own = [override for override in overrides if not override.startswith("scaling.")]
    where = [] if advice.where == "input" else [f"scaling.where={advice.where}"]
    sets = [*own, "scaling.method=cs", f"scaling.kappa={advice.kappa}", *where]
    return " ".join(["scalelong train", quote(recipe), *(f"--set {quote(override)}" for override in sets)])


def comparison_for(advice: KappaAdvice, recipe: str, overrides: list[str]) -> str:
    """What trains with the recommended κ and the ends of the band, from the same weights on the same batches."""
    where = "" if advice.where == "input" else f":where={advice.where}"
    kappas = sorted({round(advice.band.low, 2), advice.kappa, round(advice.band.high, 2)} - {0.0})
    methods = ",".join(["none", *(f"cs:kappa={kappa}{where}" for kappa in kappas)])
    own = [f"--set {quote(override)}" for override in overrides if not override.startswith("scaling.")]
    return " ".join(["scalelong compare", quote(recipe), "--methods", quote(methods), *own])
