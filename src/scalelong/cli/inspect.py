"""The command inspect: what a scaling method does to each long skip of a model, and what to be careful about."""

from __future__ import annotations

import json as json_format
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from ..models import preset_names
from ..skips import METHODS, AbsorbedScalingWarning, SkipSite, find_skips, scale_skips, surviving_share, unscale_skips
from ..skips.apply import make_scaling
from ..skips.readers import mostly_absorbed, norm_width, normalise
from ..skips.self_conditioning import NAME as CONDITIONING
from ..skips.self_conditioning import conditioned_networks
from ..skips.site import is_norm
from .console import NOTHING, count, given, make_table, natural_width, print_line, print_table
from .loading import load_target

MODEL = (
    f"A preset ({', '.join(preset_names())}), a diffusers folder, an id on the Hub, PATH.py:FUNCTION that builds a "
    "network of your own, or a recipe's .yaml."
)
SHAPE = "What a network of your own takes, to trace its skips."
SETTING = "An option of that function, or a recipe's value."

# The normalised skip is 5% smaller where eps is a ninth of the scaled skip's variance, and 29% where they are equal.
NOTICEABLE = 0.05


@dataclass(frozen=True)
class InspectedSkip:
    """One long skip and what scaling does to it."""

    index: int
    consumer: str
    entry: str
    width: int
    follows: list[str]
    """What reads the skip first."""
    absorbed: bool
    coefficient: float | None
    """None if it depends on the input."""
    share: float | None
    """What the norm lets through of the scaling; None for a skip that keeps its size or is scaled by input."""
    shrinkage: float
    """By which share the norm's eps makes the scaled and normalised skip smaller, for features of unit variance."""


@dataclass(frozen=True)
class Caution:
    """Something to know before training; `kind` is "absorbed", "eps" or "fp16"."""

    kind: str
    message: str


@dataclass(frozen=True)
class Inspection:
    """A model and a scaling method."""

    model: str
    parameters: int
    num_skips: int
    method: str
    options: dict[str, Any]
    where: str
    added_parameters: int
    sum_of_squares: float | None
    skips: list[InspectedSkip]
    warnings: list[Caution]
    self_conditioning: int
    """Parameters of the MLP through which the middle block guides the decoder; 0 without it."""


def inspect(
    model: Annotated[str, typer.Argument(metavar="PRESET|PATH|HUB_ID|PATH.py:FUNCTION", help=MODEL)],
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "cs",
    kappa: Annotated[float | None, typer.Option(help="κ of cs and cs-reversed; 0.7 if not given.")] = None,
    value: Annotated[float | None, typer.Option(help="The constant of uniform; 1/√2 if not given.")] = None,
    init: Annotated[float | None, typer.Option(help="Where a learned method starts.")] = None,
    where: Annotated[str, typer.Option(metavar="input|after-norm", help="What is scaled.")] = "input",
    shape: Annotated[str | None, typer.Option(metavar="C,H,W", help=SHAPE)] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SETTING)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of the table.")] = False,
) -> None:
    """Show the long skips of a model and what a scaling method does.

    No weights are loaded; the code of a network of your own is run. Warns about constants that a norm cancels, about
    the norm's eps, and about fp16.

    \b
    Examples:
      scalelong inspect cifar10-uvit-s2
      scalelong inspect cifar10-unet --method cs --kappa 0.5
      scalelong inspect google/ddpm-cifar10-32 --where after-norm
      scalelong inspect ./my-pipeline --method ls --json
      scalelong inspect net.py:build --shape 3,32,32 --set width=64
      scalelong inspect my-recipe.yaml --method ls
    """
    options = given(kappa=kappa, value=value, init=init)
    network, sites = load_target(model, shape, settings or [])
    inspection = inspect_model(network, method, where=where, sites=sites, **options)
    if json:
        typer.echo(json_format.dumps(asdict(inspection), indent=2))
    else:
        print_inspection(model, inspection)


def inspect_model(
    model: nn.Module, method: str, *, where: str = "input", sites: list[SkipSite] | None = None, **options: Any
) -> Inspection:
    """Inspect the long skips of a model, which may be on the meta device and is left as it was; those given, or found.

    >>> from scalelong.models import UViT
    >>> model = UViT(img_size=8, embed_dim=32, depth=4, num_heads=2)
    >>> [(skip.consumer, skip.coefficient) for skip in inspect_model(model, "cs", kappa=0.5).skips]
    [('out_blocks.1', 1.0), ('out_blocks.0', 0.5)]
    """
    sites = sites or find_skips(model)
    parameters, added, constants = count_parameters(model), 0, torch.ones(len(sites))
    scaling = make_scaling(method, sites, options)
    if scaling is not None:
        # Read before the scaling follows the model to its device: on the meta device coefficients have no values.
        added, constants = count_parameters(scaling), scaling.constants()
        # The first parameter of a method is the number of skips.
        defaults = list(signature(type(scaling)).parameters.values())[1:]
        options = {parameter.name: parameter.default for parameter in defaults} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AbsorbedScalingWarning)
        unscale_skips(scale_skips(model, method if scaling is None else scaling, where=where, sites=sites))
    coefficients = [None] * len(sites) if constants is None else constants.tolist()
    skips = [inspect_skip(model, site, kappa, where) for site, kappa in zip(sites, coefficients, strict=True)]
    own = torch.tensor([site.factor for site in sites])
    total = None if constants is None else (constants.cpu() * own).square().sum().item()
    cautions = [*absorption_cautions(skips), *eps_cautions(skips), *fp16_cautions(skips)]
    name = type(model).__name__
    guiding = sum(count_parameters(network.get_submodule(CONDITIONING)) for network in conditioned_networks(model))
    return Inspection(name, parameters, len(sites), method, options, where, added, total, skips, cautions, guiding)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def inspect_skip(model: nn.Module, site: SkipSite, kappa: float | None, where: str) -> InspectedSkip:
    readers = [model.get_submodule(reader) for reader in site.readers]
    share, shrinkage = None, 0.0
    if where == "input":
        shrinkage = shrinkage_by_eps(readers, site, kappa)
    if kappa is not None and kappa != 1:
        share = surviving_share(model, site, kappa) if where == "input" else 1.0
    follows, entry = [describe(reader) for reader in readers], str(site.entry)
    return InspectedSkip(site.index, site.consumer, entry, site.width, follows, site.absorbed, kappa, share, shrinkage)


def describe(module: nn.Module) -> str:
    """The class of a module, with the kernel of a convolution: Conv2d 1×1."""
    kernel = getattr(module, "kernel_size", None)
    return type(module).__name__ + (f" {'×'.join(map(str, kernel))}" if isinstance(kernel, tuple) else "")


def shrinkage_by_eps(readers: Sequence[nn.Module], site: SkipSite, coefficient: float | None) -> float:
    norm = next((reader for reader in readers if is_norm(reader)), None)
    if norm is None or site.joined is None or not coefficient:
        return 0.0
    skip = slice(site.joined.start, site.joined.stop)
    shape = (2, norm_width(norm, site.joined), 16)
    features = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features[:, skip] *= coefficient
    # But for its eps a norm ignores a factor common to all features; a huge one makes eps negligible.
    with_eps, without = (normalise(norm, features * factor)[:, skip].norm().item() for factor in (1.0, 1e9))
    return 1 - with_eps / without


def absorption_cautions(skips: Sequence[InspectedSkip]) -> Iterator[Caution]:
    """A norm that cancels the constants."""
    shares = [skip.share for skip in skips if skip.absorbed and skip.share is not None]
    typical = mostly_absorbed(shares)
    if typical is not None:
        message = (
            f"{len(shares)} of {len(skips)} skips enter a norm that cancels a constant: in the median "
            f"{percent(typical)} of the scaling survives it, the rest acts only through the shortcut beside the "
            "norm. Use --where after-norm, or --method ls."
        )
        yield Caution("absorbed", message)


def eps_cautions(skips: Sequence[InspectedSkip]) -> Iterator[Caution]:
    """A skip so small that the norm's eps matters beside it."""
    felt = [skip for skip in skips if skip.shrinkage > NOTICEABLE]
    if felt:
        worst = max(felt, key=lambda skip: skip.shrinkage)
        message = (
            f"the norm's eps takes over at {name_skips(felt)}: with κ_{worst.index} = {worst.coefficient:.2g} it makes "
            f"the normalised skip {percent(worst.shrinkage)} smaller for features of unit variance, and more for "
            "smaller ones. Use larger coefficients, or --where after-norm."
        )
        yield Caution("eps", message)


def fp16_cautions(skips: Sequence[InspectedSkip]) -> Iterator[Caution]:
    """A coefficient that fp16 cannot hold; 0 is exact."""
    limits = torch.finfo(torch.float16)
    sizes = {skip.index: abs(skip.coefficient) for skip in skips if skip.coefficient is not None}
    small = [skip for skip in skips if 0 < sizes.get(skip.index, 0) < limits.smallest_normal]
    if small:
        worst = min(small, key=lambda skip: sizes[skip.index])
        lost = limits.smallest_normal * limits.eps / 2 / sizes[worst.index]
        message = (
            f"fp16 underflows at {name_skips(small)}: κ_{worst.index} = {worst.coefficient:.2g} is below its smallest "
            f"normal number {limits.smallest_normal:.2g}, so that the scaled skip loses digits and features below "
            f"{lost:.1g} become 0. Use bf16, fp32 or larger coefficients."
        )
        yield Caution("fp16", message)


def name_skips(skips: Sequence[InspectedSkip]) -> str:
    """The indices of skips in order, as a range if they are one."""
    first, last = skips[0].index, skips[-1].index
    if len(skips) > 2 and last - first == len(skips) - 1:
        return f"skips {first} to {last}"
    return f"skip{'s' if len(skips) > 1 else ''} {', '.join(str(skip.index) for skip in skips)}"


def percent(share: float) -> str:
    """A share with one decimal that claims no exact 0.

    >>> [percent(share) for share in (0.0, 3e-6, 0.0351, 1.0)]
    ['0.0%', '<0.1%', '3.5%', '100.0%']
    """
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}"


def print_inspection(name: str, inspection: Inspection) -> None:
    parameters, skips = count(inspection.parameters, "parameter"), count(inspection.num_skips, "long skip")
    print_line(f"{name}: {inspection.model}, {parameters}, N = {skips}", style="bold")
    print_line(method_line(inspection))
    # One line per skip, or in a terminal too narrow for it one line per reader of a skip.
    table, console = skip_table(inspection, gap=2, separator=" + "), Console()
    if console.is_terminal and natural_width(table) > console.width:
        table = skip_table(inspection, gap=1, separator=" +\n")
    print_table(table)
    for caution in inspection.warnings:
        print_line(f"warning: {caution.message}", style="yellow")


def method_line(inspection: Inspection) -> str:
    """The method with its options, what it adds, and the sum that the paper's rule for kappa is about (Section 4.1)."""
    total, added = inspection.sum_of_squares, inspection.added_parameters
    parts = [inspection.method, *(f"{name} = {show(value)}" for name, value in given(**inspection.options).items())]
    parts += ["after the norm"] if inspection.where == "after-norm" else []
    parts += [count(added, "added parameter")] if added else []
    guiding = inspection.self_conditioning
    parts += [f"self-conditioned by {count(guiding, 'parameter')}"] if guiding else []
    parts += [] if total is None else [f"Σκ_i² = {show(total)} (the paper aims at 1.22 to 5)"]
    return ", ".join(parts)


def show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def skip_table(inspection: Inspection, *, gap: int, separator: str) -> Table:
    learned = inspection.added_parameters > 0 and inspection.sum_of_squares is not None
    kappa = ">κ_i at\nthe start" if learned else ">κ_i"
    table = make_table(">i", "consumer", "entry", ">width", "followed by", kappa, ">survives\nthe norm", gap=gap)
    for skip in inspection.skips:
        follows = separator.join(skip.follows) or ("a norm" if skip.absorbed else NOTHING)
        coefficient = "by input" if skip.coefficient is None else show(skip.coefficient)
        share = NOTHING if skip.share is None else percent(skip.share)
        cells = (str(skip.index), skip.consumer, skip.entry, str(skip.width), follows, coefficient, share)
        table.add_row(*map(Text, cells))
    return table
