"""The commands that say how good drawn images are: stats and evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import fail
from .preparing import job_errors
from .training import LARGEST_SEED, Compile, Overrides, Which, run_errors

if TYPE_CHECKING:
    from ..data import DataConfig
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
Weights = Annotated[str, typer.Option(metavar="ema|raw|both", help="EMA weights, or those of the last step.")]
Statistics = Annotated[Path | None, typer.Option("--reference", help="An .npz; else that of the run's own data.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps of the solver; else the recipe's.")]
Sampler = Annotated[str | None, typer.Option(help="The solver; else the recipe's.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="1 = the condition as it is; else the recipe's.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The first image's seed; the next has the next.")]
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
        from ..utils.distributed import Rank
        from .progress import shown_progress

        config = choose_data(data, overrides or [], size)
        with shown_progress() as show:
            path = build_reference(
                config, load_features(network), images=images, folder=out, rank=Rank.here(), progress=show
            )
        if Rank.here().index == 0:
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
    checkpoint: Which = "last",
    compare: Compare = None,
    compile: Compile = False,
) -> None:
    with evaluation_errors():
        from ..evaluation import Plan, evaluate_run
        from ..utils.distributed import Rank
        from .progress import shown_progress

        given = {"steps": steps, "sampler": sampler, "guidance": guidance}
        plan = Plan(
            images,
            choose_weights(weights),
            network,
            reference,
            seed,
            {key: value for key, value in given.items() if value is not None},
            compile,
            checkpoint,
        )
        # Read before the figures are written: they may go to the same file.
        others = [] if compare is None else read_others(compare)
        with shown_progress() as progress:
            found = evaluate_run(run, plan, rank=Rank.here(), progress=progress, others=others)
        if found:
            show(found, run)
        for one in found if others else []:
            show_comparison(one, others)


@contextmanager
def evaluation_errors() -> Iterator[None]:
    with run_errors(), job_errors():
        yield


def read_others(path: Path) -> list[Evaluation]:
    """What figures are compared with."""
    from ..evaluation import read_evaluations

    found = read_evaluations(path)
    if not found:
        raise ValueError(f"{path} holds no evaluations to compare with: scalelong evaluate writes them")
    return found


def choose_data(name: str, overrides: list[str], size: int | None) -> DataConfig:
    """A recipe's data, or a source by itself if a size is given."""
    from ..config import load_recipe
    from ..data import DataConfig

    if size is None:
        return load_recipe(name, overrides).data
    if overrides:
        fail("--set changes a recipe, and --size is for a source without one: leave one of them out")
    # Held out of the same images without taking it away from them: statistics are of all.
    return DataConfig(source=name, image_size=size, validation_split="train", validation_count=1)


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
    facts = found[0].fingerprint
    captions = "" if facts["captions"] is None else f" of {facts['captions']} captions"
    print_line(
        f"{facts['images']} images{captions}, {facts['sampler']}, against {facts['reference_images']} images; network "
        f"{facts['network']} ({facts['weights']}), resize {facts['resize']}; 95 % intervals. Written: "
        f"{run / 'evaluation.json'}"
    )


def show_comparison(one: Evaluation, others: list[Evaluation]) -> None:
    from ..evaluation import compare
    from ..evaluation.results import counterpart
    from .tables import print_line

    other = counterpart(one.fingerprint, one.weights, others)
    parts = (f"{name} {value:+.4g}" for name, value in compare(other, one).items())
    print_line(f"{one.weights} compared with step {other.step}, {other.weights}: {', '.join(parts)}")
