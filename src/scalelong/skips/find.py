"""Find the long skip connections of a model: by its family, else by tracing one forward pass."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .families import FAMILIES, Fields, Rule
from .hooks import hooks_detached, in_data_parallel
from .site import SkipSite, number_from_innermost
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
    path, sites = known_skips(model)
    if not sites and example_inputs is not None:
        with hooks_detached(model):
            path, sites = "", trace_skips(model, example_inputs)
    if sites:
        return path, sites
    known = "; ".join(FAMILIES)
    raise ValueError(
        f"no long skip connections found in {type(model).__name__}. Known families: {known}. "
        "Pass example_inputs= to let them be traced, or sites=[SkipSite(...)]; see docs/models.md."
    )


def known_skips(model: nn.Module) -> tuple[str, list[SkipSite]]:
    """Path and skips of the one known model at or below `model`; no skips if there is none."""
    found = list(outermost_known(model))
    if len(found) > 1:
        names = ", ".join(repr(path) for path, _ in found)
        raise ValueError(
            f"{type(model).__name__} holds {len(found)} models with long skips ({names}). "
            "Scale the one you train, e.g. scale_skips(model.get_submodule(...), ...)."
        )
    return (found[0][0], number_from_innermost(found[0][1])) if found else ("", [])


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
        return rule(model) or []
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s looks like the family %s but is built differently: %s", type(model), rule.__name__, error)
        return []


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if the model is already compiled or distributed, where a hook would come too late."""
    refuse_other_objects(model)
    for module in model.modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        if "DataParallel" in names:
            raise in_data_parallel(type(model).__name__)
        wrapper = next((label for name, label in WRAPPERS.items() if name in names), None)
        if wrapper is None and getattr(module, "_compiled_call_impl", None) is not None:
            wrapper = "torch.compile"
        if wrapper is not None:
            raise already_wrapped(model, wrapper)
    # A module does not know that torch.compile was given it; a second look after collecting spares a dead wrapper.
    if compiled_elsewhere(model):
        gc.collect()
        if compiled_elsewhere(model):
            raise already_wrapped(model, "torch.compile")


def refuse_other_objects(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{type(model).__name__} is not a torch module; of a pipeline pass its network, e.g. pipe.unet"
        )


def compiled_elsewhere(model: nn.Module) -> bool:
    return any(isinstance(holder, dict) and holder.get("_orig_mod") is model for holder in gc.get_referrers(model))


def already_wrapped(model: nn.Module, wrapper: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} is already wrapped by {wrapper}, which would not see the scaling. "
        f"Scale the plain model first, then apply {wrapper}."
    )
