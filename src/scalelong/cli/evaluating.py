"""The commands that say how good drawn images are: stats and evaluate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import fail, needs_extra
from .preparing import job_errors
from .training import Compile, Overrides, run_errors

if TYPE_CHECKING:
    from ..data import DataConfig
    from ..data.prepare import Share
    from ..evaluation import Evaluation

STATS = """Compute the statistics of a dataset's features once, for evaluations to compare with.

The file is an .npz with the arrays mu and sigma, which pytorch-fid reads; its name has a hash of the images and of the
network, and what is there is not computed again. DATA is a recipe, whose training images are taken, or a source of
images, with --size.

\b
Examples:
  scalelong stats digits
  scalelong stats cifar10-uvit-s2 --network inception
  scalelong stats ./photos --size 64 --images 5000"""

EVALUATE = """Compare images that a run draws with those it was trained on: Fréchet distance, KID, precision and recall.

Each figure has a 95 % interval. The table is written to the run's evaluation.json as well. The features of finished
blocks are kept in the run's folder: the same command goes on after a kill, and more images only add to them. The
distance is called FID for the original Inception only; figures of other networks, resizes, numbers of images or
samplers are not compared.

\b
Examples:
  scalelong evaluate runs/digits-cs --images 2000
  scalelong evaluate runs/cifar10-uvit-s2-cs --network inception --images 50000 --weights both --compile
  scalelong evaluate runs/mine --reference fid_stats_cifar10_train.npz --network inception:pt_inception.pth
  torchrun --nproc-per-node 8 -m scalelong evaluate runs/mine"""

Data = Annotated[str, typer.Argument(metavar="DATA|RECIPE", help="A recipe, or a source of images with --size.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Network = Annotated[str, typer.Option(help="inception[:WEIGHTS], efficientnet-lite0, a file or a folder.")]
Size = Annotated[int | None, typer.Option(min=1, help="Pixels of a side; for a source that is no recipe.")]
Out = Annotated[Path, typer.Option(help="The folder of the file.")]
Some = Annotated[int | None, typer.Option("--images", min=2, help="How many, spread evenly; all if not given.")]
Images = Annotated[int, typer.Option("--images", min=20, help="How many to draw.")]
Weights = Annotated[str, typer.Option(metavar="ema|raw|both", help="Averaged weights, or those of the last step.")]
Statistics = Annotated[Path | None, typer.Option("--reference", help="An .npz; else that of the run's own data.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps of the solver; else the recipe's.")]
Sampler = Annotated[str | None, typer.Option(help="The solver; else the recipe's.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="1 = the condition as it is; else the recipe's.")]
Seed = Annotated[int, typer.Option(min=0, help="The first image's seed; the next has the next.")]
Compare = Annotated[Path | None, typer.Option(help="Another run, or its evaluation.json: the difference to it.")]

DEFAULT_NETWORK = "efficientnet-lite0"


def stats(
    data: Data,
    overrides: Overrides = None,
    network: Network = DEFAULT_NETWORK,
    size: Size = None,
    images: Some = None,
    out: Out = Path("statistics"),
) -> None:
    with evaluation_errors():
        from ..evaluation import build_reference, load_features, load_reference

        share, config = own_share(), choose_data(data, overrides or [], size)
        with shown_progress(share) as progress:
            path = build_reference(
                config, load_features(network), images=images, folder=out, share=share, progress=progress
            )
        if path is not None:
            found = load_reference(path)
            typer.echo(f"{found.statistics.count} images, {found.statistics.width} features of {network}: {path}")


def evaluate(
    run: Run,
    images: Images = 10_000,
    weights: Weights = "ema",
    network: Network = DEFAULT_NETWORK,
    reference: Statistics = None,
    steps: Steps = None,
    sampler: Sampler = None,
    guidance: Guidance = None,
    seed: Seed = 0,
    compare: Compare = None,
    compile: Compile = False,
) -> None:
    with evaluation_errors():
        from ..evaluation import Plan, evaluate_run, read_evaluations
        from ..evaluation.results import counterpart

        given = {"steps": steps, "sampler": sampler, "guidance": guidance}
        plan = Plan(
            images,
            choose_weights(weights),
            network,
            reference,
            seed,
            {key: value for key, value in given.items() if value is not None},
            compile,
        )
        # Read before the figures are written: they may go to the same file.
        share, others = own_share(), [] if compare is None else read_evaluations(compare)
        with shown_progress(share) as progress:
            found = evaluate_run(run, plan, share=share, progress=progress)
        if found:
            show(found, run)
        if found and others:
            show_comparison(found[0], counterpart(found[0], others))


@contextmanager
def evaluation_errors() -> Iterator[None]:
    with needs_extra("eval"), run_errors(), job_errors(own_share()):
        yield


@contextmanager
def shown_progress(share: Share) -> Iterator[Callable[[int, int], None] | None]:
    """A bar in a terminal, ten lines elsewhere; only the first process shows any."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if share.rank:
        yield None
    elif not Console().is_terminal:
        yield show_tenths()
    else:
        columns = (TextColumn("images"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(compact=True))
        with Progress(*columns) as bar:
            task = bar.add_task("images", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def show_tenths() -> Callable[[int, int], None]:
    """A function that writes a line whenever another tenth of the images is done."""
    from .display import print_now

    shown = 0

    def show_line(done: int, total: int) -> None:
        nonlocal shown
        before, shown = shown, done * 10 // max(total, 1)
        if shown > before:
            print_now(f"{done} of {total} images")

    return show_line


def own_share() -> Share:
    from ..data.prepare import Share

    return Share(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def choose_data(name: str, overrides: list[str], size: int | None) -> DataConfig:
    """A recipe's data, or a source by itself if a size is given."""
    from ..data import DataConfig
    from ..training import load_recipe

    if size is None:
        return load_recipe(name, overrides).data
    if overrides:
        fail("--set changes a recipe, and --size is for a source without one: leave one of them out")
    # Nothing need be held out for training's sake, but one image must be.
    return DataConfig(source=name, image_size=size, heldout_count=1)


def choose_weights(weights: str) -> tuple[Any, ...]:
    if weights not in ("ema", "raw", "both"):
        raise ValueError(f"--weights is ema, raw or both, not {weights!r}")
    return ("ema", "raw") if weights == "both" else (weights,)


def show(found: list[Evaluation], run: Path) -> None:
    """One line per weights; a figure and its interval in each column."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from .tables import natural_width, print_line

    console, table = Console(highlight=False), Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in ("step", "weights", *found[0].figures):
        table.add_column(header, no_wrap=True)
    for one in found:
        table.add_row(str(one.step), one.weights, *map(str, one.figures.values()))
    console.width = max(console.width, natural_width(table))
    console.print(table)
    facts = found[0].facts
    print_line(
        f"{facts['images']} images, {facts['sampler']}, against {facts['reference_images']} images; network "
        f"{facts['network']} ({facts['weights']}), resize {facts['resize']}; 95 % intervals. Written: "
        f"{run / 'evaluation.json'}"
    )


def show_comparison(one: Evaluation, other: Evaluation) -> None:
    from ..evaluation import compare
    from .tables import print_line

    parts = (f"{name} {value:+.4g}" for name, value in compare(other, one).items())
    print_line(f"compared with step {other.step}, {other.weights}: {', '.join(parts)}")
