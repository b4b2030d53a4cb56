"""The command that verifies the paper's theory: theory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from .console import make_table, print_line, print_table, user_errors

if TYPE_CHECKING:
    from ..theory.verify import Check


def theory(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller networks and fewer kinds of them.")] = False,
    out: Annotated[Path, typer.Option(help="The folder of the figures.")] = Path("runs/theory"),
    cifar10: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="CIFAR-10's parquet files, to measure it as well.")
    ] = None,
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
    with user_errors("report"):
        import matplotlib  # noqa: F401  # Asked for before minutes of work are spent.
    with user_errors():
        from ..theory.figures import draw_theory
        from ..theory.input_norms import measure_datasets
        from ..theory.verify import FULL, QUICK, verify_inputs, verify_theory

        datasets = measure_datasets(cifar10, seed=seed)
        found = verify_theory(QUICK if quick else FULL, seed=seed)
        checks = [*found.checks, *verify_inputs(datasets)]
        print_checks(checks)
        figures = draw_theory(found, datasets, out)
    print_line(f"figures: {', '.join(map(str, figures))}")
    broken = [check for check in checks if not check.passed]
    print_line(f"{len(checks) - len(broken)} of {len(checks)} checks passed", style="bold")
    if broken:
        raise typer.Exit(1)


def print_checks(checks: list[Check]) -> None:
    table = make_table("law", "where", ">law says", ">measured", ">99 % interval", "", "remark")
    for check in checks:
        interval = "" if check.half_width is None else f"±{check.half_width:.1%}"
        passed = Text("ok") if check.passed else Text("BROKEN", style="bold red")
        numbers = (f"{check.expected:.4g}", f"{check.measured:.4g}", interval)
        table.add_row(Text(check.law), Text(check.where), *numbers, passed, Text(check.note))
    print_table(table)
