"""The hooks that multiply a skip where it enters the network."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .readers import Preserved
from .scaling import SkipScaling
from .site import Argument, Channels, SkipSite, is_norm

NAME = "skip_scaling"


class NetworkHook:
    """A hook that calls whatever its network holds under a name: adapters and sharding put another module there.

    An object, not a closure: a deep copy of the network copies it together with the module, so that an EMA copy never
    calls the original's. The network is referred to weakly, or it would have to wait for the garbage collector.
    """

    handle: RemovableHandle
    """Kept with the hook because unpickling it keeps its number in the module's table from being given away again."""

    def __init__(self, network: nn.Module, name: str, module: nn.Module) -> None:
        self.reference: weakref.ref[nn.Module] | None = weakref.ref(network)
        self.name, self.module = name, module

    @property
    def network(self) -> nn.Module | None:
        return None if self.reference is None else self.reference()

    @property
    def held(self) -> Any:
        """The module; its first one serves a part that was copied without its network."""
        held = None if self.network is None else self.network._modules.get(self.name)
        return self.module if held is None else held

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"reference": self.network}

    def __setstate__(self, state: dict[str, Any]) -> None:
        network = state["reference"]
        self.__dict__ |= state | {"reference": None if network is None else weakref.ref(network)}


class SkipHook(NetworkHook, ABC):
    """What every hook knows: the site it serves, the scaling that chooses its coefficient, and how it is called."""

    def __init__(self, network: nn.Module, scaling: SkipScaling, site: SkipSite, entry: Any, reads: nn.Module) -> None:
        super().__init__(network, NAME, scaling)
        self.site, self.entry = site, entry
        self.parameters = forward_parameters(reads)
        self.preserved: list[Preserved] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        """Called by torch before the forward of the module it is attached to, or after it, with the output."""
        if getattr(module, "_is_replica", False):
            raise in_data_parallel(type(module).__name__)
        return self.scale(module, args, kwargs, *output)

    @abstractmethod
    def scale(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        """The arguments, or the output, with the skip scaled."""

    def attach(self, module: nn.Module) -> None:
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)

    def coefficient(self, skip: Tensor) -> Tensor:
        # Called as a module, so that offloading, sharding and adapters of its parameters take part.
        coefficient = self.held(self.site.index, skip)
        if not isinstance(coefficient, Tensor):
            return skip.new_tensor(coefficient)
        # A 0-dim tensor does not promote a half-precision skip, and keeps the coefficient's own precision.
        return coefficient if coefficient.ndim == 0 else coefficient.to(skip.dtype)


class ArgumentHook(SkipHook):
    """Forward pre-hook: multiplies an argument of the consumer, or one item of it."""

    entry: Argument

    def scale(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        name, position = self.entry.name, self.entry.position
        if name is not None and name in kwargs:
            return args, kwargs | {name: self.scaled(kwargs[name])}
        if position is not None and position < len(args):
            return (*args[:position], self.scaled(args[position]), *args[position + 1 :]), kwargs
        raise ValueError(
            f"{self.site.consumer} ({type(module).__name__}) was called without {self.entry}, through which skip "
            f"{self.site.index} enters. Check the site's entry against the consumer's forward; see docs/models.md."
        )

    def scaled(self, value: Any) -> Any:
        if value is None:
            return None
        if self.entry.item is None:
            return value * self.coefficient(value)
        items = list(value)
        skip = items[self.entry.item]
        items[self.entry.item] = None if skip is None else skip * self.coefficient(skip)
        return tuple(items) if isinstance(value, tuple) else items


class ChannelsHook(SkipHook):
    """Forward pre-hook: multiplies the skip's channels of an already concatenated input."""

    entry: Channels

    def joined_coefficient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The concatenated input, and the coefficient of the skip in it."""
        joined = args[0] if args else kwargs[self.parameters[0]]
        return joined, self.coefficient(joined.narrow(self.entry.dim, self.entry.start, len(self.entry)))

    def scale(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        scaled = scale_channels(*self.joined_coefficient(args, kwargs), self.entry)
        return ((scaled, *args[1:]), kwargs) if args else (args, kwargs | {self.parameters[0]: scaled})


class NormOutputHook(ChannelsHook):
    """Forward hook: multiplies the skip's channels after the norm, by the coefficient of the skip before it."""

    def attach(self, module: nn.Module) -> None:
        self.handle = module.register_forward_hook(self, with_kwargs=True)

    def scale(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        return scale_channels(output[0], self.joined_coefficient(args, kwargs)[1], self.entry)


def in_data_parallel(name: str) -> ValueError:
    return ValueError(
        f"{name} is wrapped by DataParallel, whose replicas would all use the scaling on the first device. "
        "Wrap the scaled model in DistributedDataParallel instead, with one process per device."
    )


def scale_channels(joined: Tensor, coefficient: Tensor, channels: Channels) -> Tensor:
    """Multiply `channels` of `joined` by the coefficient and leave the others: one product, no split and re-join."""
    dim = channels.dim % joined.ndim
    if coefficient.ndim == 0:
        coefficient = coefficient.view([1] * joined.ndim)
    shape = list(coefficient.shape)
    shape[dim] = len(channels)
    after = joined.shape[dim] - channels.stop
    padding = [0, 0] * (joined.ndim - 1 - dim) + [channels.start, after]
    return joined * F.pad(coefficient.expand(shape), padding, value=1.0).to(joined.dtype)


def plan_hooks(model: nn.Module, site: SkipSite, scaling: SkipScaling, where: str) -> list[tuple[nn.Module, SkipHook]]:
    """The modules to hook for one site, and their hooks; nothing is attached yet."""
    nothing_absorbs = bool(site.readers) and not any(is_norm(model.get_submodule(path)) for path in site.readers)
    if where == "input" or nothing_absorbs:
        kind = ArgumentHook if isinstance(site.entry, Argument) else ChannelsHook
        module = model.get_submodule(site.consumer)
        return [(module, kind(model, scaling, site, site.entry, module))]
    if site.joined is None or not site.readers:
        raise ValueError(
            f'where="after-norm" needs to know what reads skip {site.index} at {site.consumer!r}, which its site does '
            'not say. Use where="input", or give the site its readers= and joined=; see docs/models.md.'
        )
    readers = [model.get_submodule(reader) for reader in site.readers]
    kinds = [NormOutputHook if is_norm(module) else ChannelsHook for module in readers]
    planned = zip(readers, kinds, strict=True)
    return [(module, kind(model, scaling, site, site.joined, module)) for module, kind in planned]


def forward_parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


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


def attached_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, SkipHook]]:
    """Every skip hook at or below `model`, with its module."""
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, SkipHook):
                yield module, hook


def detach_hooks(model: nn.Module, kind: type[NetworkHook] = SkipHook) -> None:
    """Remove every hook of one kind at or below `model`."""
    # Found by type rather than through stored handles, which a deep copy or a pickle would leave behind.
    for module in model.modules():
        for hooks, flags in hook_tables(module):
            for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
                del hooks[key]
                flags.pop(key, None)


@contextmanager
def hooks_detached(model: nn.Module) -> Iterator[None]:
    """The model without its skip hooks for a while; afterwards every hook is back in its old order."""
    modules = {module for module, _ in attached_hooks(model)}
    tables = [table for module in modules for pair in hook_tables(module) for table in pair]
    before = [table.copy() for table in tables]
    detach_hooks(model)
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def hook_tables(module: nn.Module) -> tuple[tuple[dict, dict], tuple[dict, dict]]:
    return (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    )
