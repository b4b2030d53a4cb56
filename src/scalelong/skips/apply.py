"""Scale the long skips of a model in place, undo it, or fold it into the weights."""

from __future__ import annotations

import difflib
import gc
import inspect
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import nn

from .find import locate_skips, refuse_other_objects
from .hooks import NAME, NormOutputHook, adopt_hooks, attached_hooks, detach_hooks, in_data_parallel, plan_hooks
from .methods import METHODS, SkipScaling, innermost
from .readers import Slice, foldable_slices, warn_if_absorbed
from .site import Argument, Channels, SkipSite, as_argument, is_norm
from .trace import ExampleInputs

Model = TypeVar("Model", bound=nn.Module)
Method = str | type[SkipScaling] | SkipScaling
WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "fully_shard",
}


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
    network, chosen, num_skips = choose_sites(model, sites, example_inputs)
    refuse_taken_name(network)
    with torch.inference_mode(False):
        scaling = make_scaling(method, chosen, options, num_skips)
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
    if where == "input" and any(site.absorbed for site in chosen):
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


def choose_sites(
    model: nn.Module, sites: Iterable[SkipSite | int] | None, example_inputs: ExampleInputs | None
) -> tuple[nn.Module, list[SkipSite], int]:
    """The network that has the skips, those to scale, their paths seen from it, and how many skips it has in all.

    All skips by default, those of the given indices, or sites written by hand; checked against the model. Skips that
    are found belong to the network inside the model that has them: its copies carry their scaling.
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
    return network, chosen, num_skips


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


def compiled_elsewhere(model: nn.Module) -> bool:
    return any(isinstance(holder, dict) and holder.get("_orig_mod") is model for holder in gc.get_referrers(model))


def already_wrapped(model: nn.Module, wrapper: str = "torch.compile") -> ValueError:
    return ValueError(
        f"{type(model).__name__} is already wrapped by {wrapper}, which would not see the change. "
        f"Scale the plain model first, or condition it, then apply {wrapper}."
    )


def refuse_taken_name(network: nn.Module) -> None:
    own = network._modules.get(NAME)
    if hasattr(type(network), NAME) or (own is not None and held_scaling(network) is None):
        raise ValueError(f"{type(network).__name__} already has an attribute {NAME!r} of its own, which scaling needs.")


def refuse_foreign(model: nn.Module) -> None:
    """Raise if the skips are scaled through a module that holds this one, whose scaling is not ours to remove."""
    own = [network for network, _ in scaled_networks(model)]
    for network in own:
        adopt_hooks(network)
    if any(hook.network not in own for _, hook in attached_hooks(model)):
        raise ValueError(
            f"the skips of {type(model).__name__} are already scaled through another module, which holds it. "
            "Call unscale_skips there first, so that the scaling is not applied twice."
        )


def follow_model(scaling: nn.Module, consumer: nn.Module) -> None:
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
