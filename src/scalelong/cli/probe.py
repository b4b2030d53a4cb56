"""The command that says what a network's features are worth: probe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from . import console

if TYPE_CHECKING:
    from ..config import Config
    from ..evaluation.probe import Probe, ProbePlan

Run = Annotated[Path | None, typer.Argument(metavar="RUN", help="The folder of a run; or --model and --data.")]
Labels = Annotated[str | None, typer.Option(metavar="COLUMN", help="The labels; else those of the recipe.")]
Model = Annotated[Path | None, typer.Option(metavar="PATH", help="A folder of a diffusers UNet (safetensors).")]
Data = Annotated[str | None, typer.Option(metavar="RECIPE|PATH", help="With --model: a recipe, or images.")]
Times = Annotated[str | None, typer.Option(metavar="T,…", help="Noise levels, as shares of the schedule, 0 to 1.")]
Count = Annotated[int, typer.Option("--images", min=50, help="Training images; a fifth chooses the best cell.")]
HeldOut = Annotated[int, typer.Option("--held-out", min=20, help="Images that confirm it.")]
Seed = Annotated[int, typer.Option(min=0, max=console.LARGEST_SEED, help="Of the noise, and of which images choose.")]
Out = Annotated[Path | None, typer.Option(help="The folder of the files; else the run's, or probe/<name>.")]


def probe(
    run: Run = None,
    labels: Labels = None,
    model: Model = None,
    data: Data = None,
    overrides: console.Overrides = None,
    times: Times = None,
    images: Count = 5000,
    held_out: HeldOut = 2000,
    weights: console.Weights = "ema",
    checkpoint: console.Which = "last",
    seed: Seed = 0,
    out: Out = None,
    allow_code: console.AllowCode = False,
) -> None:
    """Tell the class of images from a network's features: block by block, at several noise levels.

    A linear classifier (ridge regression) is fitted to the averaged output of each block. The best block and noise
    level are chosen on training images that it was not fitted to, and confirmed on images held out from training.
    Writes probe.json and a heat map, probe.png and probe.svg. Features are kept: the same command resumes after a kill.

    A network that was trained with labels or captions is asked without them.

    \b
    Examples:
      scalelong probe runs/cifar10-tiny-uvit-selfcond-cs
      scalelong probe runs/mine --labels species --images 20000 --times 0.05,0.1,0.2
      scalelong probe --model ./ddpm-cifar10-32 --data cifar10-unet
      scalelong probe --model ./my-unet --data ./photos --labels label
    """
    from ..evaluation.probe import FILE, FOLDER, TIMES, ProbePlan, probe_run
    from ..utils.atomic import replace_text, to_json

    console.require("matplotlib")
    plan = ProbePlan(images, held_out, TIMES if times is None else read_times(times), seed)
    if (run is None) == (model is None) or (model is None) != (data is None):
        raise ValueError("name either a run, or a diffusers UNet and images: --model PATH --data RECIPE|PATH")
    if overrides and model is None:
        raise ValueError("--set changes the recipe of --data; that of a run stays as it is")
    with console.shown_progress() as show:
        if run is not None:
            given: Any = {"labels": labels, "weights": weights, "checkpoint": checkpoint, "allow_code": allow_code}
            found, folder = probe_run(run, plan, progress=show, **given), out or run
        else:
            assert model is not None and data is not None
            folder = out or Path(FOLDER) / model.resolve().name
            found = probe_local(model, data, labels, overrides or [], plan, folder / "features", show)
    file = folder / FILE
    content = {**asdict(found), "interval": list(interval(found))}
    replace_text(file, to_json(content).decode() + "\n")
    print_probe(found)
    from ..report.probes import draw_probe

    drawn = draw_probe(file, folder / "probe")
    console.print_now(f"Written: {', '.join(map(str, (file, *drawn)))}")


def read_times(text: str) -> tuple[float, ...]:
    """
    >>> read_times("0.3,0.1")
    (0.1, 0.3)
    """
    try:
        times = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        times = (-1.0,)
    if not all(0 <= time <= 1 for time in times):
        raise ValueError(f"--times are shares of the schedule between 0 and 1, such as 0.05,0.1,0.2, not {text!r}")
    return times


def probe_local(
    model: Path, data: str, labels: str | None, overrides: list[str], plan: ProbePlan, folder: Path, show: console.Show
) -> Probe:
    """Probe a diffusers UNet on the data of a recipe, or on labelled images by themselves."""
    from ..config import load_recipe, recipe_names
    from ..evaluation.probe import labelled, probe_recipe
    from ..utils.atomic import sha256_of
    from ..utils.runtime import own_device
    from .loading import load_local

    network, files = load_local(model)
    is_recipe = data in recipe_names() or Path(data).suffix in (".yaml", ".yml")
    if overrides and not is_recipe:
        raise ValueError("--set changes a recipe, and --data is a source without one: write a recipe for it")
    config = load_recipe(data, overrides) if is_recipe else plain_recipe(network, data, labels, plan)
    check_fits(network, config)
    identity = {"files": [sha256_of(path)[:16] for path in files]}
    return probe_recipe(network.to(own_device()), labelled(config, labels, plan), identity, plan, folder, show)


def plain_recipe(network: Any, source: str, labels: str | None, plan: ProbePlan) -> Config:
    """DDPM's process, and images of the network's size; held out are some of the same split."""
    from ..config import load_recipe
    from ..data import DataConfig

    size, channels = network.config.sample_size, network.config.in_channels
    if not isinstance(size, int) or channels not in (1, 3):
        raise ValueError(f"{type(network).__name__} is not of square images with 1 or 3 channels: use --data RECIPE")
    found = DataConfig(
        source=source, image_size=size, channels=channels, label_column=labels, validation_count=plan.held_out
    )
    return load_recipe("cifar10-unet").model_copy(update={"data": found})


def check_fits(network: Any, config: Config) -> None:
    """Raise where the images of a recipe are not what the network takes."""
    channels, given = network.config.in_channels, config.sample_shape[0]
    if channels != given:
        raise ValueError(f"{type(network).__name__} takes {channels} channels, and the data gives {given}")


def interval(found: Probe) -> tuple[float, float]:
    from ..compare.intervals import proportion_interval

    return proportion_interval(found.correct, found.held_out)


def print_probe(found: Probe) -> None:
    """A row for each block, a column for each noise level."""
    table = console.make_table("block", *(f">t = {time:g}" for time in found.times))
    for block, row in zip(found.blocks, found.accuracies, strict=True):
        cells = [
            Text(f"{value:.1%}", style="bold" if (block, time) == (found.block, found.time) else "")
            for value, time in zip(row, found.times, strict=True)
        ]
        table.add_row(Text(block), *cells)
    console.print_table(table)
    low, high = interval(found)
    console.print_line(
        f"best: {found.block} at t = {found.time:g}; held out: {found.accuracy:.1%} of {found.held_out} images "
        f"({low:.1%} to {high:.1%}; the most frequent class alone: {found.chance:.1%})"
    )
