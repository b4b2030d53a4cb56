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
    from ..compare.kappa_trials import Probe
    from ..config import Config
    from ..kappa.advisor import KappaAdvice


def kappa(
    recipe: Recipe,
    overrides: Overrides = None,
    probe: Annotated[bool, typer.Option("--probe", help="Train briefly over the band.")] = False,
    probe_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the first round; a twentieth of the recipe's if not given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the probe's runs; runs/<recipe>-probe.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw what was measured.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Recommend κ for a recipe from its data, schedule and network.

    Measures the size of the target beside the input, solves the band of κ for the network's number of skips, and
    measures the block gain. With --probe short matched runs over the band are compared by their validation loss.

    \b
    Examples:
      scalelong kappa digits
      scalelong kappa cifar10-tiny-uvit --set data.source=../shared/data/cifar10 --figure kappa.png
      scalelong kappa digits --probe --probe-steps 200
      scalelong kappa cifar10-tiny-unet --json
    """
    if figure is not None:
        with user_errors("report"):
            import matplotlib  # noqa: F401
    with user_errors():
        from ..config import load_recipe
        from ..kappa.recipe import advise_recipe

        config = load_recipe(recipe, overrides or [])
        advice = advise_recipe(config)
        if probe:
            folder = out or Path("runs") / f"{config.name}-probe"
            advice = with_probe(advice, config, folder, probe_steps, quiet=json)
        if figure is not None:
            from ..kappa.figure import draw_advice

            draw_advice(advice, figure)
    if json:
        typer.echo(json_format.dumps(advice.summary(), indent=2, ensure_ascii=False))
    else:
        print_advice(config.name, advice)
        print_line(f"to use it: {command_for(advice, recipe, overrides or [])}")


def with_probe(advice: KappaAdvice, config: Config, folder: Path, steps: int | None, *, quiet: bool) -> KappaAdvice:
    from ..compare.kappa_trials import probe_kappas, spread_over
    from ..training.logger import Silent
    from .display import choose_display

    kappas = spread_over(advice.band, advice.kappa)
    display = Silent() if quiet else choose_display()
    probe = probe_kappas(config, kappas, folder, where=advice.where, steps=steps, display=display)
    return advice.after(probe, warmup_steps=config.optim.warmup_steps)


def print_advice(name: str, advice: KappaAdvice) -> None:
    where = "" if advice.where == "input" else f", where={advice.where}"
    band = f"band {advice.band.low:.3f} to {advice.band.high:.3f}"
    print_line(f"{name}: κ = {advice.kappa}{where} ({band})", style="bold")
    for reason in advice.reasons:
        print_line(f"- {reason}")
    if advice.probe is not None:
        print_probe(advice.probe)


def command_for(advice: KappaAdvice, recipe: str, overrides: list[str]) -> str:
    """What trains the recipe, as it was measured, with the recommended κ."""
    own = [override for override in overrides if not override.startswith("scaling.")]
    where = [] if advice.where == "input" else [f"scaling.where={advice.where}"]
    sets = [*own, "scaling.method=cs", f"scaling.kappa={advice.kappa}", *where]
    return " ".join(["scalelong train", quote(recipe), *(f"--set {quote(override)}" for override in sets)])


def print_probe(probe: Probe) -> None:
    from ..compare.kappa_trials import WARNING

    for scores in probe.rounds:
        print_line(f"probe, {scores[0].steps} steps: validation loss")
        for score in scores:
            behind = "" if score is scores[0] else f", behind by {score.behind:.4f} ± {score.behind_error:.4f}"
            loss = "diverged" if score.diverged else f"{score.loss:.4f} ± {score.standard_error:.4f}{behind}"
            print_line(f"  κ = {score.kappa}: {loss}")
    print_line(f"warning: {WARNING}", style="yellow")
