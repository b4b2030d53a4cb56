"""Scale the long skips of a model in place, undo it, or fold it into the weights."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .find import ExampleInputs, choose_sites, refuse_wrapped
from .methods import METHODS, SkipScaling, innermost
from .readers import AbsorbedScalingWarning, Slice, foldable_slices, mostly_absorbed, surviving_shares
from .site import NAME, NormOutputHook, SkipSite, attached_hooks, detach_hooks, plan_hooks

Model = TypeVar("Model", bound=nn.Module)
Method = str | type[SkipScaling] | SkipScaling


def scale_skips(
    model: Model,
    method: Method,
    *,
    sites: Iterable[SkipSite | int] | None = None,
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
    choice = choose_sites(model, sites, example_inputs)
    network, chosen = choice.network, choice.sites
    refuse_taken_name(network)
    with torch.inference_mode(False):
        scaling = make_scaling(method, chosen, options, choice.num_skips)
    if scaling is None:
        return unscale_skips(model)
    check_scaling(scaling, chosen)
    planned = [pair for site in chosen for pair in plan_hooks(network, site, scaling, where)]
    preserved: list[Slice] = []
    if preserve:
        with weights_restored(model):
            preserved = foldable_slices(network, chosen, scaling, where)
            for part in preserved:
                part.keep(network)
    if where == "input":
        warn_if_absorbed(network, chosen, scaling.constants())
    indices = ",".join(str(index) for index in sorted(site.index for site in chosen))
    scaling.sign(f"{scaling.settings()} {where} skips {indices}")
    follow_model(scaling, network.get_submodule(chosen[0].consumer))
    unscale_skips(model)
    network.add_module(NAME, scaling.train(network.training))
    for module, hook in planned:
        hook.attach(module)
        hook.preserved = [part for part in preserved if part.index == hook.site.index]
    for part in preserved:
        part.divide(network)
    return model


def unscale_skips(model: Model) -> Model:
    """Remove the scaling; the model computes to the bit what it did before. Does nothing on an unscaled model."""
    refuse_foreign(model)
    restore_weights(model)
    for network, _ in scaled_networks(model):
        remove(network)
    return model


@torch.no_grad()
def fuse_skips(model: Model) -> Model:
    """Fold constant coefficients into the weights that read the skips and remove the scaling: a vanilla checkpoint.

    Raises, with the reason, where that is not exact: a gate depends on its input, or a norm comes first.
    """
    refuse_foreign(model)
    networks = scaled_networks(model)
    if not networks:
        raise ValueError(f"{type(model).__name__} has no scaled skips to fuse; call scale_skips first.")
    for network, scaling in networks:
        hooks = [hook for _, hook in attached_hooks(network)]
        sites = list({hook.site.index: hook.site for hook in hooks}.values())
        where = "after-norm" if any(isinstance(hook, NormOutputHook) for hook in hooks) else "input"
        for part in foldable_slices(network, sites, scaling, where):
            part.of(network).mul_(part.coefficient)
        remove(network)
    return model


def restore_weights(model: nn.Module) -> None:
    """Undo the divisions of `preserve=True`."""
    for network, scaling, part in preserved_slices(model):
        part.restore(network, scaling.constants())


@contextmanager
def weights_restored(model: nn.Module) -> Iterator[None]:
    """The model with the weights it has when unscaled, for a while: what an earlier `preserve=True` divided is back."""
    divided = [part.of(network) for network, _, part in preserved_slices(model)]
    before = [weights.clone() for weights in divided]
    restore_weights(model)
    try:
        yield
    finally:
        for weights, values in zip(divided, before, strict=True):
            weights.copy_(values)


def preserved_slices(model: nn.Module) -> Iterator[tuple[nn.Module, SkipScaling, Slice]]:
    """Every weight slice that an earlier `preserve=True` divided, once, with its network and scaling."""
    for network, scaling in scaled_networks(model):
        for part in {id(part): part for _, hook in attached_hooks(network) for part in hook.preserved}.values():
            yield network, scaling, part


def remove(network: nn.Module) -> None:
    detach_hooks(network)
    delattr(network, NAME)


def make_scaling(
    method: Method, sites: Sequence[SkipSite], options: dict[str, Any], num_skips: int | None = None
) -> SkipScaling | None:
    """The scaling for these sites; a method with an option `num_skips` gets the number of the model's skips."""
    if isinstance(method, SkipScaling):
        if options:
            raise ValueError(f"options {sorted(options)} cannot be applied to an instance; set them when making it")
        return method
    kind = method_class(method)
    parameters = [] if kind is None else list(inspect.signature(kind).parameters.values())[1:]
    accepted = [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
    unknown = [name for name in options if name not in accepted]
    if unknown and len(accepted) == len(parameters):
        allowed = ", ".join(accepted) or "none"
        closest = hint(unknown[0], accepted)
        raise ValueError(f"method {method!r} has no option {unknown[0]!r}. Its options: {allowed}.{closest}")
    if "num_skips" in accepted and num_skips is not None:
        options = {"num_skips": num_skips} | options
    return None if kind is None else kind(sites, **options)


def method_class(method: Method) -> type[SkipScaling] | None:
    if isinstance(method, type) and issubclass(method, SkipScaling):
        return method
    if not isinstance(method, str) or method not in METHODS:
        closest, methods = hint(str(method).lower(), list(METHODS)), ", ".join(METHODS)
        raise ValueError(f"unknown method {method!r}.{closest} Methods: {methods}, or a SkipScaling.")
    return METHODS[method]


def hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_scaling(scaling: SkipScaling, sites: Sequence[SkipSite]) -> None:
    """Raise if the scaling was made for fewer skips, or has constants that are no finite numbers."""
    name, needed = type(scaling).__name__, innermost(sites)
    if scaling.num_skips < needed:
        raise ValueError(f"this {name} was made for {scaling.num_skips} skips, but skip {needed} is to be scaled")
    constants, wanted = scaling.constants(), scaling.num_skips
    if constants is None or constants.is_meta:
        return
    if constants.shape != (wanted,) or not constants.isfinite().all():
        raise ValueError(f"{name} needs one finite coefficient for each of {wanted} skips, got {constants.tolist()}")


def warn_if_absorbed(model: nn.Module, sites: Sequence[SkipSite], constants: Tensor | None) -> None:
    """Warn once, with the measured share, if most of a constant scaling never arrives."""
    if constants is None or constants.is_meta or not any(site.absorbed for site in sites):
        return
    shares = surviving_shares(model, sites, constants.tolist())
    typical = mostly_absorbed(shares)
    if typical is not None:
        warnings.warn(
            f"{len(shares)} of {len(sites)} skips of {type(model).__name__} enter a normalisation that cancels a "
            f"constant: {typical:.1%} of the scaling survives it (median, on unit-variance features), the rest acts "
            'only through the shortcut beside the norm. Use where="after-norm", or method "ls"; see docs/models.md.',
            AbsorbedScalingWarning,
            stacklevel=3,
        )


def refuse_taken_name(network: nn.Module) -> None:
    own = network._modules.get(NAME)
    if hasattr(type(network), NAME) or (own is not None and held_scaling(network) is None):
        raise ValueError(f"{type(network).__name__} already has an attribute {NAME!r} of its own, which scaling needs.")


def refuse_foreign(model: nn.Module) -> None:
    """Raise if the skips are scaled through a module that holds this one, whose scaling is not ours to remove."""
    own = [network for network, _ in scaled_networks(model)]
    if any(hook.network not in own for _, hook in attached_hooks(model)):
        raise ValueError(
            f"the skips of {type(model).__name__} are already scaled through another module, which holds it. "
            "Call unscale_skips there first, so that the scaling is not applied twice."
        )


def follow_model(scaling: SkipScaling, consumer: nn.Module) -> None:
    """Move the scaling to the consumer's device, and its parameters to the consumer's precision.

    Constants stay in float32: a buffer takes no part in sharding, and a small kappa_N would be rounded.
    """
    like = next((p for p in consumer.parameters() if p.is_floating_point()), None)
    if like is not None:
        scaling.to(like.device)
        for parameter in scaling.parameters():
            parameter.data = parameter.data.to(like.dtype)


def scaled_networks(model: nn.Module) -> list[tuple[nn.Module, SkipScaling]]:
    """The modules at or below `model` that hold a scaling, with it."""
    held = [(module, held_scaling(module)) for module in model.modules()]
    return [(module, scaling) for module, scaling in held if scaling is not None]


def held_scaling(network: nn.Module) -> SkipScaling | None:
    """The network's scaling, if it has one; of the copies that peft trains (`modules_to_save`) the one in use."""
    held: Any = network._modules.get(NAME)
    copies, active = getattr(held, "modules_to_save", {}), getattr(held, "active_adapters", ())
    held = next((copies[adapter] for adapter in active if adapter in copies), held)
    return held if isinstance(held, SkipScaling) else None
