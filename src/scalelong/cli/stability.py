"""The commands of the stability lab: theory and kappa."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import needs_extra
from .tables import print_line
from .training import Overrides, run_errors

if TYPE_CHECKING:
    from ..compare.kappa_trials import Probe
    from ..config import Config
    from ..kappa.advisor import KappaAdvice
    from ..theory.verify import Check

THEORY = """Verify the paper's theory numerically on the UNet it analyses, and draw what was found.

Every law is checked on networks drawn at random: feature norms, the band around them, gradients, the robustness bound,
and the size of noised images. Takes minutes, with --quick less than one. Exit code 1: a law was broken.

\b
Examples:
  scalelong theory --quick
  scalelong theory --out docs/figures --cifar10 ../shared/data/cifar10"""

KAPPA = """Recommend κ for a recipe, from its own data, schedule and network.

Measures the size of the target beside the input, solves the band of κ for the network's number of skips, and measures
the block gain. With --probe short matched runs over the band are judged by their validation loss.

\b
Examples:
  scalelong kappa digits
  scalelong kappa cifar10-tiny-uvit --set data.source=../shared/data/cifar10 --figure kappa.png
  scalelong kappa digits --probe --probe-steps 200
  scalelong kappa cifar10-tiny-unet --json"""


def theory(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller networks and fewer kinds of them.")] = False,
    out: Annotated[Path, typer.Option(help="The folder of the figures.")] = Path("runs/theory"),
    cifar10: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="CIFAR-10's parquet files, to measure it as well.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Other networks.")] = 0,
) -> None:
    with needs_extra("report"):
        import matplotlib  # noqa: F401  # Asked for before minutes of work are spent.
    with run_errors():
        from ..theory.figures import draw_theory
        from ..theory.verify import FULL, QUICK, verify_theory
        from ..theory.verify_inputs import measure_datasets, verify_inputs

        datasets = measure_datasets(cifar10, seed=seed)
        found = verify_theory(QUICK if quick else FULL, seed=seed)
        checks = [*found.checks, *verify_inputs(datasets)]
        print_checks(checks)
        figures = draw_theory(found.curves, datasets, out)
    print_line(f"figures: {', '.join(map(str, figures))}")
    broken = [check for check in checks if not check.passed]
    print_line(f"{len(checks) - len(broken)} of {len(checks)} checks passed", style="bold")
    if broken:
        raise typer.Exit(1)


def print_checks(checks: list[Check]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from .tables import natural_width

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for header in ("law", "where"):
        table.add_column(header, no_wrap=True)
    for header in ("law says", "measured", "99 % interval"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("remark")
    for check in checks:
        half = "" if check.half_width is None else f"±{check.half_width:.1%}"
        verdict = Text("ok") if check.passed else Text("BROKEN", style="bold red")
        numbers = (f"{check.expected:.4g}", f"{check.measured:.4g}", half)
        table.add_row(Text(check.law), Text(check.where), *numbers, verdict, Text(check.note))
    console = Console(highlight=False)
    console.width = max(console.width, natural_width(table))
    console.print(table)


def kappa(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name, or the path of a .yaml file.")],
    overrides: Overrides = None,
    probe: Annotated[bool, typer.Option("--probe", help="Train briefly over the band.")] = False,
    probe_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the first round; a twentieth of the recipe's if not given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the probe's runs; runs/<recipe>-probe.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw what was measured.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    if figure is not None:
        with needs_extra("report"):
            import matplotlib  # noqa: F401
    with run_errors():
        from ..config import load_recipe
        from ..kappa.recipe import advise_recipe

        config = load_recipe(recipe, overrides or [])
        advice, trials = advise_recipe(config), None
        if probe:
            folder = out or Path("runs") / f"{config.name}-probe"
            advice, trials = with_probe(advice, config, folder, probe_steps, quiet=json)
        if figure is not None:
            from ..kappa.figure import draw_advice

            draw_advice(advice, figure)
    if json:
        summary = {**advice.summary(), "probe": None if trials is None else trials.summary()}
        typer.echo(json_format.dumps(summary, indent=2, ensure_ascii=False))
    else:
        print_advice(config.name, advice)
        if trials is not None:
            print_probe(trials)
        print_line(f"to use it: {command_for(advice, recipe, overrides or [])}")


def with_probe(
    advice: KappaAdvice, config: Config, folder: Path, steps: int | None, *, quiet: bool
) -> tuple[KappaAdvice, Probe]:
    from ..compare.kappa_trials import after_probe, probe_kappas, spread_over
    from ..training.display import Silent
    from .display import choose_display

    kappas = spread_over(advice.band, advice.kappa)
    display = Silent() if quiet else choose_display()
    probe = probe_kappas(config, kappas, folder, where=advice.where, steps=steps, display=display)
    return after_probe(advice, probe, warmup_steps=config.optim.warmup_steps), probe


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


def print_probe(probe: Probe) -> None:
    from ..compare.kappa_trials import WARNING

    for scores in probe.rounds:
        print_line(f"probe, {scores[0].steps} steps: validation loss")
        for score in scores:
            behind = "" if score is scores[0] else f", behind by {score.behind:.4f} ± {score.behind_error:.4f}"
            loss = "diverged" if score.diverged else f"{score.loss:.4f} ± {score.standard_error:.4f}{behind}"
            print_line(f"  κ = {score.kappa}: {loss}")
    print_line(f"warning: {WARNING}", style="yellow")
