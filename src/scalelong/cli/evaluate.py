"""The commands that say how good samples are: stats and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import console

if TYPE_CHECKING:
    from ..data import DataConfig
    from ..evaluation import Evaluation

DEFAULT_NETWORK = "efficientnet-lite0"

Network = Annotated[str, typer.Option(help="inception[:WEIGHTS], efficientnet-lite0, torchscript:FILE, a folder.")]
Resize = Annotated[
    Literal["pytorch-fid", "tf1", "clean"] | None, typer.Option(help="Of the inception; else as pytorch-fid's.")
]


def stats(
    data: Annotated[str, typer.Argument(metavar="DATA|RECIPE", help="A recipe, or a source of images with --size.")],
    overrides: console.Overrides = None,
    network: Network = DEFAULT_NETWORK,
    resize: Resize = None,
    size: Annotated[int | None, typer.Option(min=1, help="Pixels of a side; for a source that is no recipe.")] = None,
    images: Annotated[int | None, typer.Option("--images", min=2, help="How many, spread evenly; else all.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of the file.")] = Path("statistics"),
) -> None:
    """Compute the statistics of a dataset's features once.

    Evaluations compare with them. The file is an .npz with the arrays mu and sigma, which pytorch-fid reads; its name
    has a hash of the images and of the network, and what is there is not computed again. DATA is a recipe, whose
    training images are taken, or a source of images, with --size.

    \b
    Examples:
      scalelong stats digits
      scalelong stats cifar10-uvit-s2 --network inception
      scalelong stats ./photos --size 64 --images 5000
    """
    from ..evaluation import build_reference, load_features, load_reference
    from ..utils.runtime import Rank
    from ..utils.team import together

    with together(Rank.here()) as rank, console.shown_progress() as show:
        config, features = choose_data(data, overrides or [], size), load_features(network, resize)
        path = build_reference(config, features, images=images, folder=out, rank=rank, progress=show)
    if console.is_first_process():
        found = load_reference(path).statistics
        console.print_now(f"{found.count} images, {found.width} features of {network}: {path}")


def choose_data(name: str, overrides: list[str], size: int | None) -> DataConfig:
    """A recipe's data, or a source by itself if a size is given."""
    from ..config import load_recipe
    from ..data import DataConfig

    if size is None:
        return load_recipe(name, overrides).data
    if overrides:
        raise ValueError("--set changes a recipe, and --size is for a source without one: leave one of them out")
    # The validation image is one of the others: statistics are of all.
    return DataConfig(source=name, image_size=size, validation_split="train", validation_count=1)


def evaluate(
    run: console.RunFolder,
    images: Annotated[int, typer.Option("--images", min=20, help="How many samples.")] = 10_000,
    weights: Annotated[Literal["ema", "raw", "both"], typer.Option(help="EMA weights, or the last step's.")] = "ema",
    network: Network = DEFAULT_NETWORK,
    resize: Resize = None,
    reference: Annotated[Path | None, typer.Option("--reference", help="An .npz; else of the run's own data.")] = None,
    steps: console.Steps = None,
    sampler: console.Sampler = None,
    timestep_spacing: console.TimestepSpacing = None,
    variance: console.NoiseVariance = None,
    clip: console.Clip = None,
    guidance: console.Guidance = None,
    seed: console.Seed = 0,
    checkpoint: console.Which = "last",
    compare: Annotated[Path | None, typer.Option(help="A run, or its evaluation.json, to compare with.")] = None,
    compile: console.Compile = False,
    allow_code: console.AllowCode = False,
) -> None:
    """Compare samples of a run with the images it was trained on.

    Prints the Fréchet distance, KID, precision and recall, and with the original Inception its score, each with a 95 %
    interval, and writes them to the run's evaluation.json as well. The features of finished blocks are kept in the
    run's folder: the same command resumes after a kill, and more images only add to them. The distance is called FID
    for the original Inception only; figures of other networks, resizes, numbers of images or samplers are not compared.
    A reference may be a file of scalelong stats, of pytorch-fid, of clean-fid (--resize clean) or a batch of ADM
    (--resize tf1).

    \b
    Examples:
      scalelong evaluate runs/digits-cs --images 2000
      scalelong evaluate runs/cifar10-uvit-s2-cs --network inception --images 50000 --weights both --compile
      scalelong evaluate runs/mine --reference fid_stats_cifar10_train.npz --network inception:pt_inception.pth
      scalelong evaluate runs/mine --reference VIRTUAL_imagenet64_labeled.npz --network inception --resize tf1
      torchrun --nproc-per-node 8 -m scalelong evaluate runs/mine
    """
    from ..evaluation import Plan, evaluate_run, read_evaluations
    from ..utils.runtime import Rank
    from ..utils.team import together

    kinds = ("ema", "raw") if weights == "both" else (weights,)
    changed = {"timestep_spacing": timestep_spacing, "variance": variance, "clip": clip}
    sampling = console.given(steps=steps, sampler=sampler, guidance=guidance, **changed)
    plan = Plan(images, kinds, network, reference, seed, sampling, compile, checkpoint, resize, allow_code)
    # Read before the figures are written: they may go to the same file.
    others = [] if compare is None else read_evaluations(compare)
    if compare is not None and not others:
        raise ValueError(f"{compare} holds no evaluations to compare with: scalelong evaluate writes them")
    with together(Rank.here()) as rank, console.shown_progress() as show:
        found = evaluate_run(run, plan, rank=rank, progress=show, others=others)
    if found:
        print_evaluations(found, run)
    for one in found if others else []:
        print_comparison(one, others)


def print_evaluations(found: list[Evaluation], run: Path) -> None:
    """One line per weights; a figure and its interval in each column."""
    table = console.make_table("step", "weights", *found[0].figures)
    for one in found:
        table.add_row(str(one.step), one.weights, *map(str, one.figures.values()))
    console.print_table(table)
    known = found[0].fingerprint
    captions = "" if known["captions"] is None else f" of {known['captions']} captions"
    count = known["reference_images"]
    reference = "published statistics" if count is None else f"{count} images"
    console.print_line(
        f"{known['images']} images{captions}, {known['sampler']}, against {reference}; network "
        f"{known['network']} ({known['weights']}), resize {known['resize']}; 95 % intervals. Written: "
        f"{run / 'evaluation.json'}"
    )


def print_comparison(one: Evaluation, others: list[Evaluation]) -> None:
    from ..evaluation import compare
    from ..evaluation.results import counterpart

    other = counterpart(one.fingerprint, one.weights, others)
    parts = (f"{name} {value:+.4g}" for name, value in compare(other, one).items())
    console.print_line(f"{one.weights} compared with step {other.step}, {other.weights}: {', '.join(parts)}")
