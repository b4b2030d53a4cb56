"""Choose which skips of a model to scale, and refuse what cannot be meant."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from .find import ExampleInputs, locate_skips
from .site import Argument, Channels, SkipSite, is_norm


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

    Skips that are found belong to the network that has them, which may lie inside the model that is passed, so that a
    copy or a checkpoint of that network carries their scaling.
    """
    wanted = None if sites is None else list(sites) if isinstance(sites, Iterable) else [sites]
    if wanted and all(isinstance(site, SkipSite) for site in wanted):
        network, chosen = model, [site for site in wanted if isinstance(site, SkipSite)]
        num_skips = max(site.index for site in chosen)
    else:
        path, found = locate_skips(model, example_inputs)
        network, num_skips = model.get_submodule(path), len(found)
        chosen = found if wanted is None else [pick(site, found) for site in wanted]
    if not chosen:
        raise ValueError("sites=[] scales nothing; leave it out to scale every skip that find_skips finds")
    chosen = [checked(network, site) for site in chosen]
    for order, site in enumerate(chosen):
        for other in chosen[:order]:
            refuse_same_skip(network, site, other)
    return Choice(network, chosen, num_skips)


def pick(wanted: SkipSite | int, found: Sequence[SkipSite]) -> SkipSite:
    try:
        index = operator.index(wanted)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"sites= takes SkipSites, or indices of skips such as [1, 2], not {wanted!r}") from None
    for candidate in found:
        if candidate.index == index:
            return candidate
    raise ValueError(f"there is no skip {index}; this model has skips 1 (outermost) to {len(found)} (innermost)")


def checked(network: nn.Module, site: SkipSite) -> SkipSite:
    """The site, with `absorbed` set if one of its readers is a norm; raises if it names a module that is not there."""
    for path in (site.consumer, *site.readers):
        try:
            network.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"skip {site.index} names the module {path!r}, which {type(network).__name__} does not have; "
                "see [name for name, _ in model.named_modules()]"
            ) from None
    return replace(site, absorbed=site.absorbed or any(is_norm(network.get_submodule(path)) for path in site.readers))


def refuse_same_skip(network: nn.Module, site: SkipSite, other: SkipSite) -> None:
    same_consumer = network.get_submodule(site.consumer) is network.get_submodule(other.consumer)
    if site.index == other.index or (same_consumer and same_entry(network, site, other)):
        raise ValueError(
            f"two sites on one skip: {site.index} at {site.consumer!r} ({site.entry}) and "
            f"{other.index} at {other.consumer!r} ({other.entry}). Give each skip one site and an index of its own."
        )


def same_entry(network: nn.Module, site: SkipSite, other: SkipSite) -> bool:
    a, b = site.entry, other.entry
    if isinstance(a, Channels) and isinstance(b, Channels):
        return a.start < b.stop and b.start < a.stop
    if isinstance(a, Argument) and isinstance(b, Argument):
        consumer = network.get_submodule(site.consumer)
        return position(consumer, a) == position(consumer, b) and a.item == b.item
    return False


def position(consumer: nn.Module, entry: Argument) -> int | str | None:
    """The argument's place in the forward's signature, however it was given."""
    names = list(inspect.signature(consumer.forward).parameters)
    if entry.position is None and entry.name in names:
        return names.index(entry.name)
    return entry.name if entry.position is None else entry.position
