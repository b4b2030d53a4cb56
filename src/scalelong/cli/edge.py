"""The command that looks for the largest learning rate that training survives: edge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .compare import command_line, list_jobs, numbers, print_plan, report
from .console import Collect, Force, Jobs, Overrides, Recipe, check_sizes, print_line


def edge(
    recipe: Recipe,
    methods: Annotated[str, typer.Option(metavar="NAME[:OPTION=VALUE],…", help="Whose edge is looked for.")] = (
        "none,uniform,cs,ls,cs-reversed"
    ),
    seeds: Annotated[int, typer.Option(help="Runs of each method at each rate; seed k is the recipe's plus k.")] = 8,
    lr: Annotated[
        str | None, typer.Option(metavar="RATE,…", help="First rates; else ½ to 8 times the recipe's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run; else the recipe's.")] = None,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core, or GPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; runs/<recipe>-edge if not given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the first runs and stop; writes nothing.")] = False,
    jobs: Jobs = False,
    collect: Collect = False,
    force: Force = False,
) -> None:
    """Find the largest learning rate that training survives, for each method.

    All methods are tried at a few rates first, then each closer to its edge: the rate that half of its seeds survive. A
    run that has clearly failed is stopped. It is a comparison over learning rates: its runs are matched, shared among
    the cores and kept in the same files, and the same command again resumes it, or extends it with more seeds.

    On a cluster: --jobs prints one command for each run that is left, and, when those are done, for the runs that are
    closer to the edges; --collect makes the tables of what is there.

    An edge belongs to the length of the runs: longer runs fail at lower rates.

    Ctrl-C or SIGTERM: every run is saved, and the exit code is 130 or 143. Exit code 1: a run broke off with an error.

    \b
    Examples:
      scalelong edge digits --steps 400
      scalelong edge digits --methods none,cs,cs:kappa=0.5 --seeds 8 --lr 4e-3,8e-3,1.6e-2,3.2e-2
      scalelong edge digits --set optim.clip_norm=null --set model.depth=20 --workers 2
      scalelong edge cifar10-tiny-uvit --set data.source=./cifar10 --dry-run
    """
    from ..compare.search import find_edges, make_search, rates_in
    from .compare_display import choose_display
    from .edge_display import print_edges

    search = make_search(
        recipe,
        [part.strip() for part in methods.split(",") if part.strip()],
        seeds=seeds,
        rates=numbers("--lr", lr, float),
        overrides=[*(overrides or []), *([] if steps is None else [f"training.steps={steps}"])],
    )
    check_sizes([arm.config for arm in search.first.arms], force=force)
    folder = out or Path("runs") / f"{search.first.recipe}-edge"
    if dry_run:
        print_plan(search.plan(rates_in(folder)), folder, workers)
        print_line("then closer to the edge of each method, with about as many runs again; failed runs stop early")
        return
    command, trains = command_line(), not (jobs or collect)
    display = choose_display() if trains else None
    result = find_edges(search, folder, workers=workers, display=display, command=command, trains=trains)
    list_jobs(result, search.first) if jobs else report(result, command, print_edges)
