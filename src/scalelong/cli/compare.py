"""The command that compares methods by matched runs: compare."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import printable
from .console import Collect, Force, Jobs, Overrides, Recipe, check_sizes, count, fail, print_line

if TYPE_CHECKING:
    from ..compare.grid import Plan
    from ..compare.run import CompareResult


def compare(
    recipe: Recipe,
    methods: Annotated[str, typer.Option(metavar="NAME[:OPTION=VALUE],…", help="What is compared.")] = (
        "none,uniform,cs,ls"
    ),
    seeds: Annotated[int, typer.Option(help="Runs of each method; seed k is the recipe's plus k.")] = 5,
    lr: Annotated[str | None, typer.Option(metavar="RATE,…", help="Every method at every rate.")] = None,
    depth: Annotated[str | None, typer.Option(metavar="DEPTH,…", help="Every method at every depth.")] = None,
    batch: Annotated[str | None, typer.Option(metavar="SIZE,…", help="Every method at every batch size.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run; else the recipe's.")] = None,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core, or GPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; runs/<recipe>-comparison if not given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is written.")] = False,
    jobs: Jobs = False,
    collect: Collect = False,
    force: Force = False,
) -> None:
    """Compare methods by matched runs: same start, batches and noise.

    Runs are shared among the cores. The same command again resumes where it was stopped, and with more seeds or methods
    extends the comparison. Results: results.json, results.csv and curves.csv in the folder. A method may carry options:
    cs:kappa=0.5, ls:ratio=4:activation=elu. The baseline is none, or the first method if none is not among them.

    Ctrl-C or SIGTERM: every run is saved, and the exit code is 130 or 143. Exit code 1: a run broke off with
    an error. Exit code 2: the comparison could not be made as asked, and one line says why. A run that fails, because
    its loss is not finite, the guard gives it up or it does not learn, is a result.

    On a cluster: --jobs prints one command for each run that is left, for any scheduler; --collect makes the tables of
    what is there.

    \b
    Examples:
      scalelong compare digits
      scalelong compare digits --methods none,cs:kappa=0.5,cs,ls --seeds 8
      scalelong compare digits --methods none,cs --lr 2e-3,4e-3,8e-3,1.6e-2
      scalelong compare digits --methods none:lr=4e-3,cs:lr=8e-3
      scalelong compare digits --methods none,ls --depth 6,10,14 --batch 32,128 --steps 1000
      scalelong compare cifar10-tiny-uvit --set data.source=./cifar10 --dry-run
      scalelong compare cifar10-tiny-uvit --jobs > jobs.txt
    """
    from ..compare import run
    from ..compare.grid import make_plan
    from .compare_display import choose_display, print_results

    plan = make_plan(
        recipe,
        [part.strip() for part in methods.split(",") if part.strip()],
        seeds=seeds,
        rates=numbers("--lr", lr, float),
        depths=numbers("--depth", depth, int),
        batches=numbers("--batch", batch, int),
        overrides=[*(overrides or []), *([] if steps is None else [f"training.steps={steps}"])],
    )
    check_sizes([arm.config for arm in plan.arms], force=force)
    folder = out or Path("runs") / f"{plan.recipe}-comparison"
    if dry_run:
        print_plan(plan, folder, workers)
        return
    command, trains = command_line(), not (jobs or collect)
    result = run.compare(
        plan, folder, workers=workers, display=choose_display() if trains else None, command=command, trains=trains
    )
    list_jobs(result, plan) if jobs else report(result, command, print_results)


def command_line() -> str:
    """The command as it was given, without what only says how much of it to do."""
    return shlex.join(["scalelong", *(word for word in sys.argv[1:] if word not in ("--jobs", "--collect"))])


def list_jobs(result: CompareResult, plan: Plan) -> None:
    """A command for each run that is left, which may run anywhere where the folder is."""
    code = ["--allow-code"] if any(arm.config.model.kind == "python" for arm in plan.arms) else []
    for path in result.left:
        typer.echo(printable(shlex.join(["scalelong", "job", str(path), *code])))
    what = f"{count(len(result.left), 'job')}, each for one GPU or a few cores"
    typer.echo(f"{what}; when they are done: {command_line()} --collect", err=True)


def numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> list[Any]:
    """The values of an option that takes several."""
    try:
        return [kind(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        fail(f"{option} takes numbers with commas between them, not {text!r}")


def print_plan(plan: Plan, folder: Path, workers: int | None) -> None:
    from ..compare import run
    from ..compare.grid import check_plan
    from ..training.logger import clock

    check_plan(folder, plan)
    used = run.count_workers(plan, workers)
    for arm in plan.arms:
        print_line(f"{arm.id}: {arm.label}, {arm.setting}")
    training = plan.arms[0].config.training
    print_line(
        f"{count(len(plan.runs), 'run')}: {count(len(plan.arms), 'arm')} × {count(len(plan.seeds), 'seed')} "
        f"({', '.join(map(str, plan.seeds))}), {count(plan.steps, 'step')} each; "
        f"validation loss every {training.validate_every}, checkpoint every {training.checkpoint_every}"
    )
    print_line(f"{count(used, 'worker')}, about {clock(run.estimate_seconds(plan, used))}, in {folder}")


def report(result: CompareResult, command: str, show: Callable[[Any], None]) -> None:
    """The tables, what went wrong, and how to resume; ends the process where the exit code says something."""
    folder, results = result.folder, result.results
    show(results)
    for run, message in result.failures.items():
        typer.echo(printable(f"broken: {run}: {message}"), err=True)
    print_line(f"results: {', '.join(str(folder / name) for name in ('results.json', 'results.csv', 'curves.csv'))}")
    if result.signal is not None:
        done = f"{results['runs_done']} of {count(results['runs_total'], 'run')} done"
        print_line(f"stopped and saved: {done}. To resume: {command}")
        sys.exit(128 + result.signal)
    if result.left and result.signal is None:
        print_line(f"{count(len(result.left), 'job')} left: {command} --jobs")
    if result.failures:
        print_line(f"{count(len(result.failures), 'run')} broke, see {folder / 'logs'}. To try again: {command}")
        sys.exit(1)
