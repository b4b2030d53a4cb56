"""Find the long skip connections of a model, by its family or else by tracing, and choose which of them to scale."""

from __future__ import annotations

import gc
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from .families import FAMILIES, Fields, Rule
from .site import (
    Argument,
    Channels,
    SkipSite,
    as_argument,
    hooks_detached,
    in_data_parallel,
    is_norm,
    number_from_innermost,
)
from .trace import trace_skips

logger = logging.getLogger(__name__)

ExampleInputs = Tensor | Sequence[Any] | Mapping[str, Any]
WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "fully_shard",
}


def find_skips(model: nn.Module, example_inputs: ExampleInputs | None = None) -> list[SkipSite]:
    """The model's long skip connections, outermost first.

    A known family is recognised by class name and structure, also inside a wrapper (a Lightning module, a peft model,
    a diffusion process that holds the network). For any other model pass `example_inputs` (a tensor, a tuple of
    positional or a dict of keyword arguments) and one forward pass is traced.

    >>> from scalelong.models import UViT
    >>> [site.consumer for site in find_skips(UViT(img_size=8, embed_dim=32, depth=4, num_heads=2))]
    ['out_blocks.1', 'out_blocks.0']
    """
    path, sites = locate_skips(model, example_inputs)
    return [site.below(path) for site in sites]


def locate_skips(model: nn.Module, example_inputs: ExampleInputs | None) -> tuple[str, list[SkipSite]]:
    """The path of the network that has the skips, and its skips, outermost first."""
    refuse_other_objects(model)
    known = list(outermost_known(model))
    if len(known) > 1:
        names = ", ".join(repr(path) for path, _ in known)
        raise ValueError(
            f"{type(model).__name__} holds {len(known)} models with long skips ({names}). "
            "Scale the one you train, e.g. scale_skips(model.get_submodule(...), ...)."
        )
    if known:
        path, fields = known[0]
        return path, number_from_innermost(fields)
    if example_inputs is not None:
        with hooks_detached(model):
            traced = trace_skips(model, example_inputs)
        if traced:
            return "", traced
    raise ValueError(
        f"no long skip connections found in {type(model).__name__}. Known families: {'; '.join(FAMILIES)}. "
        "Pass example_inputs= to let them be traced, or sites=[SkipSite(...)]; see docs/models.md."
    )


def outermost_known(model: nn.Module, path: str = "") -> Iterator[tuple[str, list[Fields]]]:
    """Paths and skips of the known models at or below `model`, not looking inside one that was found."""
    for rule in FAMILIES.values():
        if fields := apply_rule(rule, model):
            yield path, fields
            return
    for name, child in model.named_children():
        yield from outermost_known(child, f"{path}.{name}" if path else name)


def apply_rule(rule: Rule, model: nn.Module) -> list[Fields]:
    """The rule's sites; none for another family, nor for a namesake that is built differently."""
    try:
        return list(rule(model))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s looks like the family %s but is built differently: %s", type(model), rule.__name__, error)
        return []


@dataclass(frozen=True)
class Choice:
    """The sites to scale, their paths seen from `network`, which has `num_skips` of them in all."""

    network: nn.Module
    sites: list[SkipSite]
    num_skips: int


def choose_sites(
    model: nn.Module, sites: Iterable[SkipSite | int] | None, example_inputs: ExampleInputs | None
) -> Choice:
    """All skips by default, those of the given indices, or sites written by hand; checked against the model.

    Skips that are found belong to the network inside the model that has them: its copies carry their scaling.
    """
    wanted = None if sites is None else list(sites) if isinstance(sites, Iterable) else [sites]
    by_hand = [site for site in wanted or () if isinstance(site, SkipSite)]
    if by_hand and by_hand == wanted:
        network, chosen, num_skips = model, by_hand, max(site.index for site in by_hand)
    else:
        path, found = locate_skips(model, example_inputs)
        network, num_skips = model.get_submodule(path), len(found)
        chosen = found if wanted is None else [pick(site, found) for site in wanted]
    if not chosen:
        raise ValueError("sites=[] scales nothing; leave it out to scale every skip that find_skips finds")
    chosen = [checked(network, site) for site in chosen]
    for site, other in combinations(chosen, 2):
        if site.index == other.index or same_place(network, site, other):
            raise ValueError(
                f"two sites on one skip: {other.index} at {other.consumer!r} ({other.entry}) and "
                f"{site.index} at {site.consumer!r} ({site.entry}). Give each skip one site and an index of its own."
            )
    return Choice(network, chosen, num_skips)


def pick(wanted: Any, found: Sequence[SkipSite]) -> SkipSite:
    try:
        index = operator.index(wanted)
    except TypeError:
        raise ValueError(f"sites= takes SkipSites, or indices of skips such as [1, 2], not {wanted!r}") from None
    if not 1 <= index <= len(found):
        raise ValueError(f"there is no skip {index}; this model has skips 1 (outermost) to {len(found)} (innermost)")
    return found[index - 1]


def checked(network: nn.Module, site: SkipSite) -> SkipSite:
    """The site, with `absorbed` set if one of its readers is a norm; raises if it names a module that is not there."""
    for path in (site.consumer, *site.readers):
        try:
            network.get_submodule(path)
        except AttributeError:
            missing = f"skip {site.index} names the module {path!r}, which {type(network).__name__} does not have"
            raise ValueError(f"{missing}; see [name for name, _ in model.named_modules()]") from None
    return replace(site, absorbed=site.absorbed or any(is_norm(network.get_submodule(path)) for path in site.readers))


def same_place(network: nn.Module, site: SkipSite, other: SkipSite) -> bool:
    consumer, a, b = network.get_submodule(site.consumer), site.entry, other.entry
    if consumer is not network.get_submodule(other.consumer):
        return False
    if isinstance(a, Channels) and isinstance(b, Channels):
        return a.start < b.stop and b.start < a.stop
    if isinstance(a, Argument) and isinstance(b, Argument):
        keys = (str(entry.name) if entry.position is None else entry.position for entry in (a, b))
        return a.item == b.item and len({as_argument(consumer, key) for key in keys}) == 1
    return False


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if the model is already compiled or distributed, where a hook would come too late."""
    refuse_other_objects(model)
    for module in model.modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        if "DataParallel" in names:
            raise in_data_parallel(type(model).__name__)
        found = [label for name, label in WRAPPERS.items() if name in names]
        if found or getattr(module, "_compiled_call_impl", None) is not None:
            raise already_wrapped(model, *found[:1])
    # A module does not know that torch.compile was given it; a second look after collecting spares a dead wrapper.
    if compiled_elsewhere(model):
        gc.collect()
        if compiled_elsewhere(model):
            raise already_wrapped(model)


def refuse_other_objects(model: Any) -> None:
    if not isinstance(model, nn.Module):
        name = type(model).__name__
        raise ValueError(f"{name} is not a torch module; of a pipeline pass its network, e.g. pipe.unet")


def compiled_elsewhere(model: nn.Module) -> bool:
    return any(isinstance(holder, dict) and holder.get("_orig_mod") is model for holder in gc.get_referrers(model))


def already_wrapped(model: nn.Module, wrapper: str = "torch.compile") -> ValueError:
    return ValueError(
        f"{type(model).__name__} is already wrapped by {wrapper}, which would not see the scaling. "
        f"Scale the plain model first, then apply {wrapper}."
    )
