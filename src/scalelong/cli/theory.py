"""The commands about the paper's theory: theory verifies it, kappa applies it to a recipe."""

from __future__ import annotations

import json as json_format
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .console import Overrides, Recipe, make_table, print_line, print_table, require, set_options, shown_progress

if TYPE_CHECKING:
    from ..kappa.advisor import KappaAdvice
    from ..theory.verify import Check


def theory(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller networks and fewer kinds of them.")] = False,
    out: Annotated[Path, typer.Option(help="The folder of the figures.")] = Path("runs/theory"),
    cifar10: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Measure CIFAR-10's parquet files.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Other networks.")] = 0,
) -> None:
    """Verify the paper's theory numerically on the UNet it analyses.

    Every law is checked on random networks: feature norms, the band around them, gradients, the robustness bound, and
    the size of noised images; figures show the results. It takes minutes, with --quick less than one. Exit code 1: a
    law was broken.

    \b
    Examples:
      scalelong theory --quick
      scalelong theory --out docs/figures --cifar10 ../shared/data/cifar10
    """
    require("matplotlib")
    from ..theory.figures import draw_theory
    from ..theory.input_norms import measure_datasets
    from ..theory.verify import FULL, QUICK, verify_inputs, verify_theory

    datasets = measure_datasets(cifar10, seed=seed)
    found = verify_theory(QUICK if quick else FULL, seed=seed)
    checks = [*found.checks, *verify_inputs(datasets)]
    print_checks(checks)
    figures = draw_theory(found, datasets, out)
    print_line(f"figures: {', '.join(map(str, figures))}")
    passed = sum(check.passed for check in checks)
    print_line(f"{passed} of {len(checks)} checks passed", style="bold")
    if passed < len(checks):
        raise typer.Exit(1)


def print_checks(checks: list[Check]) -> None:
    table = make_table("law", "where", ">law says", ">measured", ">99 % interval", "", "remark")
    for check in checks:
        interval = "" if check.half_width is None else f"±{check.half_width:.1%}"
        passed = Text("ok") if check.passed else Text("BROKEN", style="bold red")
        numbers = (f"{check.expected:.4g}", f"{check.measured:.4g}", interval)
        table.add_row(Text(check.law), Text(check.where), *numbers, passed, Text(check.note))
    print_table(table)


def kappa(
    recipe: Recipe,
    overrides: Overrides = None,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw what was measured.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="About how long the block gain may take.")] = 10.0,
) -> None:
    """Recommend κ for a recipe from its data, schedule and network.

    Measures the size of the target beside the input, solves the band of κ for the network's number of skips, which is
    there at once, and measures the block gain. Data that is not on this machine is replaced by stand-ins of its shape.
    The last line compares values of the band by training.

    \b
    Examples:
      scalelong kappa digits
      scalelong kappa cifar10-tiny-uvit --set data.source=../shared/data/cifar10 --figure kappa.png
      scalelong kappa cifar10-tiny-unet --json
    """
    if figure is not None:
        require("matplotlib")
    from ..config import load_recipe
    from ..kappa.advisor import advise_recipe

    config = load_recipe(recipe, overrides or [])
    with shown_progress() as show:
        steps: Any = partial(show, "steps of the block gain")
        advice = advise_recipe(config, seconds=seconds, show_band=None if json else print_early, progress=steps)
    if figure is not None:
        from ..kappa.advisor import draw_advice

        draw_advice(advice, figure)
    if json:
        typer.echo(json_format.dumps(advice.summary(), indent=2, ensure_ascii=False))
        return
    where = "" if advice.where == "input" else f", where={advice.where}"
    band = f"band {advice.band.low:.3f} to {advice.band.high:.3f}"
    print_line(f"{config.name}: κ = {advice.kappa}{where} ({band})", style="bold")
    for reason in advice.reasons:
        print_line(f"- {reason}")
    settings = [setting for setting in overrides or [] if not setting.startswith("scaling.")]
    print_line(f"to use it: {train_command(advice, recipe, settings)}")
    print_line(f"to compare values of κ: {compare_command(advice, recipe, settings)}")


def print_early(line: str) -> None:
    """What is known before the rest: the result on stdout says it again."""
    typer.echo(line, err=True)


def train_command(advice: KappaAdvice, recipe: str, settings: list[str]) -> str:
    """What trains the recipe, as it was measured, with the recommended κ."""
    where = [] if advice.where == "input" else [f"scaling.where={advice.where}"]
    settings = [*settings, "scaling.method=cs", f"scaling.kappa={advice.kappa}", *where]
    return shlex.join(["scalelong", "train", recipe, *set_options(settings)])


def compare_command(advice: KappaAdvice, recipe: str, settings: list[str]) -> str:
    """What trains with the recommended κ and the ends of the band, from the same weights on the same batches."""
    where = "" if advice.where == "input" else f":where={advice.where}"
    kappas = sorted({round(advice.band.low, 2), advice.kappa, round(advice.band.high, 2)} - {0.0})
    methods = ",".join(["none", *(f"cs:kappa={kappa}{where}" for kappa in kappas)])
    return shlex.join(["scalelong", "compare", recipe, "--methods", methods, *set_options(settings)])
