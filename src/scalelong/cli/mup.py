"""The commands of μP: coordcheck looks whether it holds, transfer whether the best rate is the same at every width."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .compare import numbers, print_plan, report
from .console import Force, Overrides, Recipe, check_sizes, make_table, print_line, print_table, require, shown_progress
from .edge_display import ranged

if TYPE_CHECKING:
    from ..compare.coordinates import BlockSlope

Widths = Annotated[
    str, typer.Option(metavar="WIDTH,…", help="embed_dim, or features of the finest level; heads grow in number.")
]


def transfer(
    recipe: Recipe,
    widths: Widths = "32,64,128",
    lr: Annotated[str | None, typer.Option(metavar="RATE,…", help="Rates; else ¼ to 8 times the recipe's.")] = None,
    methods: Annotated[str, typer.Option(metavar="NAME[:OPTION=VALUE],…", help="Scalings; else the recipe's.")] = "",
    seeds: Annotated[int, typer.Option(help="Runs of each; seed k is the recipe's plus k.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run; else the recipe's.")] = None,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core, or GPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; runs/<recipe>-transfer if not given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is written.")] = False,
    force: Force = False,
) -> None:
    """Ask whether the best learning rate of a narrow network is that of a wide one.

    Trains every width at every rate, in the standard parametrization and in μP with the smallest width as its base,
    where both are the same. Says where the best rate of each width is and how far it moves, with intervals over
    seeds, and how to train at the largest width. It is a comparison: its runs are matched, shared among the cores and
    kept in the same files, and the same command again resumes it, or extends it with more rates, widths or seeds.

    Ctrl-C or SIGTERM: every run is saved, and the exit code is 130 or 143. Exit code 1: a run broke off with an error.

    \b
    Examples:
      scalelong transfer digits --widths 32,64,128 --lr 1e-3,2e-3,4e-3,8e-3,1.6e-2 --steps 400
      scalelong transfer digits --widths 32,128 --methods none,cs --seeds 5
      scalelong transfer cifar10-tiny-uvit-mup --set data.source=./cifar10 --dry-run
    """
    from ..compare import run
    from ..compare.transfer import make_transfer
    from .compare_display import choose_display

    plan = make_transfer(
        recipe,
        numbers("--widths", widths, int),
        rates=numbers("--lr", lr, float),
        seeds=seeds,
        methods=[part.strip() for part in methods.split(",") if part.strip()],
        overrides=[*(overrides or []), *([] if steps is None else [f"training.steps={steps}"])],
    )
    check_sizes([arm.config for arm in plan.arms], force=force)
    folder = out or Path("runs") / f"{plan.recipe}-transfer"
    if dry_run:
        print_plan(plan, folder, workers)
        return
    command = shlex.join(["scalelong", *sys.argv[1:]])
    result = run.compare(plan, folder, workers=workers, display=choose_display(), command=command)
    report(result, command, print_transfer)


def coordcheck(
    recipe: Recipe,
    widths: Widths = "32,64,128,256",
    steps: Annotated[int, typer.Option(min=1, help="Steps of Adam before the blocks are read again.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, help="Networks at each width; seed k is the recipe's plus k.")] = 3,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The folder; runs/<recipe>-coordcheck if not given.")] = None,
    force: Force = False,
) -> None:
    """Check that training moves the blocks of a wide network as much as those of a narrow one.

    Takes a few steps at the recipe's full rate at every width, and measures how much they changed what each block
    gives. In μP the change does not depend on the width: the slope of its logarithm over that of the width is 0. In the
    standard parametrization it grows. The base width is the recipe's, or the smallest. Figures, a page and
    coordcheck.json are written to the folder. Exit code 1: the slope of a block is not within ±0.3.

    \b
    Examples:
      scalelong coordcheck digits --set model.parametrization=mup
      scalelong coordcheck digits; echo "standard: exit code $?"
      scalelong coordcheck cifar10-tiny-uvit-mup --set data.source=./cifar10 --steps 5
    """
    require("matplotlib", "jinja2")
    from ..compare.coordinates import check_coordinates, describe_slopes, recipes_at
    from ..compare.grid import write_json
    from ..report.figures import draw_figures
    from ..report.page import Content, write_page
    from ..report.transfer import coordinates_part

    configs = recipes_at(recipe, overrides or [], numbers("--widths", widths, int))
    check_sizes(configs.values(), force=force)
    first = next(iter(configs.values()))
    folder = out or Path("runs") / f"{first.name}-coordcheck"
    with shown_progress() as show:
        found = check_coordinates(configs, steps=steps, seeds=seeds, progress=partial(show, "networks"))
    table = describe_slopes(first, found, steps)
    print_slopes(found)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "coordcheck.json", table)
    content = Content([coordinates_part(table)])
    write_page(content, folder / "report.html")
    draw_figures(content, folder)
    passed = sum(one.verdict == "ok" for one in found)
    print_line(f"{passed} of {len(found)} blocks pass, {first.model.parametrization}; figures: {folder}", style="bold")
    if passed < len(found):
        raise typer.Exit(1)


def print_slopes(found: list[BlockSlope]) -> None:
    """The change of each block at every width, and its slope."""
    table = make_table("block", *(f">width {width}" for width in found[0].widths), ">slope", "")
    for one in found:
        slope, means = asdict(one.slope), (f"{fmean(row):.4g}" for row in one.changes)
        style = "" if one.verdict == "ok" else "bold red"
        table.add_row(Text(one.block), *means, ranged(slope, "+.2f"), Text(one.verdict, style=style))
    print_table(table)


def print_transfer(results: Any) -> None:
    """For each method a table of losses over rates, what it says of the best rate, and how to train."""
    for found in results["transfer"]:
        print_line(f"{results['recipe']}, {found['label']}, {results['steps']:,} steps: validation loss", style="bold")
        rates = sorted({rate for family in found["families"] for one in family["widths"] for rate in one["rates"]})
        table = make_table("parametrization", ">width", *(f">{rate:g}" for rate in rates), ">best rate")
        for family in found["families"]:
            for one in family["widths"]:
                losses = dict(zip(one["rates"], one["mean"], strict=True))
                cells = ["failed" if losses.get(rate) is None else f"{losses[rate]:.4f}" for rate in rates]
                table.add_row(Text(family["label"]), str(one["width"]), *cells, ranged(one["best"], ".3g"))
        print_table(table)
        for family in found["families"]:
            print_line(f"- {family['sentence']}")
        if found["carried"]:
            print_line(f"- {found['carried']['sentence']}")
        print_line(found["advice"], style="bold")
    for warning in results["warnings"]:
        print_line(f"warning: {warning}", style="yellow")
