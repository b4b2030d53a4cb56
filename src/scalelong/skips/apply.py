"""Scale the long skips of a model in place, undo it, or fold it into the weights."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .absorb import warn_if_absorbed
from .find import ExampleInputs, find_skips, refuse_wrapped
from .fuse import Preserved, Slice, cannot_fold, foldable_slices
from .hooks import NormOutputHook, attached_hooks, detach_hooks, plan_hooks
from .scaling import METHODS, SkipScaling
from .site import Channels, SkipSite

Model = TypeVar("Model", bound=nn.Module)
Method = str | type[SkipScaling] | SkipScaling
NAME = "skip_scaling"


def scale_skips(
    model: Model,
    method: Method,
    *,
    sites: Sequence[SkipSite | int] | None = None,
    example_inputs: ExampleInputs | None = None,
    where: str = "input",
    preserve: bool = False,
    **options: Any,
) -> Model:
    """Scale the model's long skips in place and return it; scaling again replaces what was there.

    `method` is a name ("none", "uniform", "cs", "cs-reversed", "ls", "ls-individual", "ie", "learnable",
    "learned-kappa", "norm"), a `SkipScaling` subclass or an instance; `options` are the method's own (`kappa=0.7`).
    `sites` are the skips to scale, as `SkipSite`s or indices (1 = outermost); all that `find_skips` finds by default.
    `where="after-norm"` scales after a norm that would cancel a constant, and on the shortcut beside it.
    `preserve=True` divides the weights that read the skip by the coefficient: the same function at the start.

    >>> from scalelong.models import UViT
    >>> model = scale_skips(UViT(img_size=8, embed_dim=32, depth=4, num_heads=2), "cs", kappa=0.5)
    >>> model.skip_scaling.coefficients.tolist()
    [1.0, 0.5]
    """
    refuse_wrapped(model)
    refuse_foreign(model)
    if where not in ("input", "after-norm"):
        raise ValueError(f'where must be "input" or "after-norm", got {where!r}')
    chosen = choose_sites(model, sites, example_inputs)
    scaling = make_scaling(method, chosen, options)
    if scaling is None:
        return unscale_skips(model)
    check_constants(scaling)
    planned = [pair for site in chosen for pair in plan_hooks(model, site, scaling, where)]
    divided = preservable(model, chosen, scaling, where) if preserve else []
    if where == "input":
        warn_if_absorbed(model, chosen, scaling.constants())
    unscale_skips(model)
    model.add_module(NAME, scaling.train(model.training))
    follow_model(scaling, model.get_submodule(chosen[0].consumer))
    for module, hook in planned:
        hook.attach(module)
    scaling.preserved = [Preserved(part, coefficient) for part, coefficient in divided]
    return model


def unscale_skips(model: Model) -> Model:
    """Remove the scaling; the model computes to the bit what it did before. Does nothing on an unscaled model."""
    refuse_foreign(model)
    scaling = scaling_of(model)
    if scaling is not None:
        for part in scaling.preserved:
            part.restore()
        remove(model)
    return model


@torch.no_grad()
def fuse_skips(model: Model) -> Model:
    """Fold constant coefficients into the weights that read the skips and remove the scaling: a vanilla checkpoint.

    Raises, with the reason, where that is not exact: a gate depends on its input, or a norm comes first.
    """
    scaling = scaling_of(model)
    if scaling is None:
        raise ValueError(f"{type(model).__name__} has no scaled skips to fuse; call scale_skips first.")
    hooks = [hook for _, hook in attached_hooks(model)]
    sites = list({hook.site.index: hook.site for hook in hooks}.values())
    where = "after-norm" if any(isinstance(hook, NormOutputHook) for hook in hooks) else "input"
    for part, coefficient in folds(model, sites, scaling, where):
        part.values.mul_(coefficient)
    remove(model)
    return model


def scaling_of(model: nn.Module) -> SkipScaling | None:
    scaling = model._modules.get(NAME)
    return scaling if isinstance(scaling, SkipScaling) else None


def remove(model: nn.Module) -> None:
    detach_hooks(model)
    delattr(model, NAME)


def folds(model: nn.Module, sites: Sequence[SkipSite], scaling: SkipScaling, where: str) -> list[tuple[Slice, float]]:
    """Every weight slice to multiply, with its coefficient; raises before anything is changed."""
    constants = scaling.constants()
    if constants is None:
        raise cannot_fold(sites[0], f"the coefficients of {type(scaling).__name__} depend on the input")
    return [(part, constants[site.index - 1].item()) for site in sites for part in foldable_slices(model, site, where)]


def preservable(
    model: nn.Module, sites: Sequence[SkipSite], scaling: SkipScaling, where: str
) -> list[tuple[Slice, float]]:
    parts = folds(model, sites, scaling, where)
    if any(coefficient == 0 for _, coefficient in parts):
        raise ValueError("preserve=True cannot divide weights by a coefficient of 0; start from another init=")
    return parts


def make_scaling(method: Method, sites: Sequence[SkipSite], options: dict[str, Any]) -> SkipScaling | None:
    if isinstance(method, SkipScaling):
        if options:
            raise ValueError(f"options {sorted(options)} cannot be applied to an instance; set them when making it")
        return method
    kind = named_method(method) if isinstance(method, str) else method
    accepted = [] if kind is None else list(inspect.signature(kind).parameters)[1:]
    unknown = [name for name in options if name not in accepted]
    if unknown:
        allowed = ", ".join(accepted) or "none"
        raise ValueError(
            f"method {method!r} has no option {unknown[0]!r}. Its options: {allowed}.{hint(unknown[0], accepted)}"
        )
    return None if kind is None else kind(sites, **options)


def check_constants(scaling: SkipScaling) -> None:
    constants = scaling.constants()
    if constants is None or constants.is_meta:
        return
    if constants.shape != (scaling.num_skips,) or not constants.isfinite().all():
        raise ValueError(
            f"{type(scaling).__name__} needs one finite coefficient for each of {scaling.num_skips} skips, "
            f"got {constants.tolist()}"
        )


def named_method(name: str) -> type[SkipScaling] | None:
    if name not in METHODS:
        methods = ", ".join(METHODS)
        raise ValueError(f"unknown method {name!r}.{hint(name, list(METHODS))} Methods: {methods}, or a SkipScaling.")
    return METHODS[name]


def hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def choose_sites(
    model: nn.Module, sites: Sequence[SkipSite | int] | None, example_inputs: ExampleInputs | None
) -> list[SkipSite]:
    """The sites to scale, checked against the model."""
    if sites is None or any(isinstance(site, int) for site in sites):
        found = find_unscaled(model, example_inputs)
    else:
        found = []
    chosen = found if sites is None else [pick(site, found) for site in sites]
    if not chosen:
        raise ValueError("sites=[] scales nothing; leave it out to scale every skip that find_skips finds")
    for order, site in enumerate(chosen):
        check_site(model, site)
        for other in chosen[:order]:
            refuse_same_skip(site, other)
    return chosen


def find_unscaled(model: nn.Module, example_inputs: ExampleInputs | None) -> list[SkipSite]:
    """`find_skips` with the model's own scaling out of the way, so that a trace sees the plain model."""
    hooks = detach_hooks(model)
    try:
        return find_skips(model, example_inputs)
    finally:
        for module, hook in hooks:
            hook.attach(module)


def pick(site: SkipSite | int, found: Sequence[SkipSite]) -> SkipSite:
    if isinstance(site, SkipSite):
        return site
    for candidate in found:
        if candidate.index == site:
            return candidate
    raise ValueError(f"there is no skip {site}; this model has skips 1 (outermost) to {len(found)} (innermost)")


def check_site(model: nn.Module, site: SkipSite) -> None:
    for path in (site.consumer, *site.readers):
        try:
            model.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"skip {site.index} names the module {path!r}, which {type(model).__name__} does not have; "
                "see [name for name, _ in model.named_modules()]"
            ) from None


def refuse_same_skip(site: SkipSite, other: SkipSite) -> None:
    same_place = site.consumer == other.consumer and (site.entry == other.entry or overlap(site, other))
    if site.index == other.index or same_place:
        raise ValueError(
            f"two sites on one skip: {site.index} at {site.consumer!r} ({site.entry}) and "
            f"{other.index} at {other.consumer!r} ({other.entry}). Give each skip one site and an index of its own."
        )


def overlap(site: SkipSite, other: SkipSite) -> bool:
    a, b = site.entry, other.entry
    return isinstance(a, Channels) and isinstance(b, Channels) and a.start < b.stop and b.start < a.stop


def refuse_foreign(model: nn.Module) -> None:
    """Raise if the name is taken, or if the skips are already scaled through a parent or a child of this module."""
    own = model._modules.get(NAME)
    if hasattr(type(model), NAME) or (own is not None and not isinstance(own, SkipScaling)):
        raise ValueError(f"{type(model).__name__} already has an attribute {NAME!r} of its own, which scaling needs.")
    if any(hook.scaling is not own for _, hook in attached_hooks(model)):
        raise ValueError(
            f"the skips of {type(model).__name__} are already scaled through another module that holds or is held by "
            "it. Call unscale_skips there first, so that the scaling is not applied twice."
        )


def follow_model(scaling: SkipScaling, consumer: nn.Module) -> None:
    """Move the scaling to the consumer's device, and its parameters to the consumer's precision.

    Constants stay in float32: a buffer takes no part in sharding, and a small kappa_N would be rounded.
    """
    like = next((p for p in consumer.parameters() if p.is_floating_point()), None)
    if like is None:
        return
    scaling.to(like.device)
    for parameter in scaling.parameters():
        parameter.data = parameter.data.to(like.dtype)
