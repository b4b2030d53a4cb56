"""Find the long skips of a model: by its family, if that is known, or else by tracing one forward pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from .families import FAMILIES, Fields, Rule
from .hooks import hooks_detached
from .site import SkipSite, number_from_innermost
from .trace import ExampleInputs, refuse_uncalled, trace_skips

logger = logging.getLogger(__name__)


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
        sites = number_from_innermost(fields)
        if example_inputs is not None:
            with hooks_detached(model):
                refuse_uncalled(model, [site.below(path) for site in sites], example_inputs)
        return path, sites
    if example_inputs is not None:
        with hooks_detached(model):
            traced = trace_skips(model, example_inputs)
        if traced:
            return "", traced
    advice = "Pass example_inputs= to let them be traced, or sites=[SkipSite(...)]; see docs/models.md."
    if example_inputs is not None:
        advice = (
            "Its forward pass joins nothing from before a bottleneck after it; if it should, pass sites=[SkipSite()]."
        )
    known_families = "; ".join(FAMILIES)
    raise ValueError(
        f"no long skip connections found in {type(model).__name__}. Known families: {known_families}. {advice}"
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


def refuse_other_objects(model: Any) -> None:
    if not isinstance(model, nn.Module):
        name = type(model).__name__
        raise ValueError(f"{name} is not a torch module; of a pipeline pass its network, e.g. pipe.unet")
