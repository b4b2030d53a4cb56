"""The hooks that multiply long skips where they enter the network."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .inline import Interceptor, register
from .site import Arguments, Channels, Inline, Keywords, SkipSite, argument_of, is_norm

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


class SkipHook(NetworkHook):
    """Forward pre-hook: multiplies a skip where it enters, alone or among the channels of what it is joined to."""

    def __init__(self, network: nn.Module, scaling: nn.Module, site: SkipSite, entry: Any, reads: nn.Module) -> None:
        super().__init__(network, NAME, scaling)
        self.site, self.argument = site, argument_of(reads, entry)
        self.channels = entry if isinstance(entry, Channels) else None
        # The weights (readers.Slice) that `preserve=True` divided for this skip: a copy of the hook can undo it, too.
        self.preserved: list[Any] = []

    def attach(self, module: nn.Module) -> None:
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, *output: Tensor) -> Any:
        """Called by torch before the forward of the module it is attached to, or after it, with the output."""
        if getattr(module, "_is_replica", False):
            raise in_data_parallel(type(module).__name__)
        return self.scale(module, args, kwargs, *output)

    def scale(self, module: nn.Module, args: Arguments, kwargs: Keywords, *output: Tensor) -> Any:
        """The arguments, or the output, with the skip scaled."""
        changed = self.argument.changed(args, kwargs, self.scaled)
        if changed is None:
            raise ValueError(
                f"{self.site.consumer} ({type(module).__name__}) was called without {self.argument}, through which "
                f"skip {self.site.index} enters. Check the site's entry against the consumer's forward; see "
                "docs/models.md."
            )
        return changed

    def scaled(self, value: Tensor) -> Tensor:
        coefficient = self.coefficient(value)
        return value * coefficient if self.channels is None else scale_channels(value, coefficient, self.channels)

    def coefficient(self, value: Tensor) -> Tensor:
        """By what the skip is multiplied, which is the value or some channels of it."""
        skip = value if self.channels is None else self.channels.of(value)
        # Called as a module, so that offloading, sharding and adapters of its parameters take part.
        coefficient = self.held(self.site.index, skip)
        if not isinstance(coefficient, Tensor):
            return skip.new_tensor(coefficient)
        # A 0-dim tensor does not promote a half-precision skip, and keeps the coefficient's own precision.
        return coefficient if coefficient.ndim == 0 else coefficient.to(skip.dtype)


class NormOutputHook(SkipHook):
    """Forward hook: multiplies the skip's channels after the norm, by the coefficient of the skip before it."""

    channels: Channels

    def attach(self, module: nn.Module) -> None:
        self.handle = module.register_forward_hook(self, with_kwargs=True)

    def scale(self, module: nn.Module, args: Arguments, kwargs: Keywords, *output: Tensor) -> Any:
        joined = args[0] if args else kwargs[str(self.argument.name)]
        return scale_channels(output[0], self.coefficient(joined), self.channels)


class InlineHook(SkipHook, Interceptor):
    """Forward pre-hook and forward hook: multiplies a skip that the module's own forward joins, at the join."""

    def __init__(self, network: nn.Module, scaling: nn.Module, site: SkipSite, entry: Any, reads: nn.Module) -> None:
        NetworkHook.__init__(self, network, NAME, scaling)
        self.site, self.entry, self.channels = site, entry, None
        self.preserved = []

    def attach(self, module: nn.Module) -> None:
        self.handle, self.last_handle = register(module, self)

    def scale(self, module: nn.Module, args: Arguments, kwargs: Keywords, *output: Any) -> None:
        Interceptor.__call__(self, module, args, kwargs, *output)

    def change(self, value: Tensor) -> Tensor:
        return value * self.coefficient(value)


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


def plan_hooks(model: nn.Module, site: SkipSite, scaling: nn.Module, where: str) -> list[tuple[nn.Module, SkipHook]]:
    """The modules to hook for one site, and their hooks; nothing is attached yet."""
    nothing_absorbs = bool(site.readers) and not any(is_norm(model.get_submodule(path)) for path in site.readers)
    if where == "input" or nothing_absorbs:
        module = model.get_submodule(site.consumer)
        kind: type[SkipHook] = InlineHook if isinstance(site.entry, Inline) else SkipHook
        return [(module, kind(model, scaling, site, site.entry, module))]
    if site.joined is None or not site.readers:
        raise ValueError(
            f'where="after-norm" needs to know what reads skip {site.index} at {site.consumer!r}, which its site does '
            'not say. Use where="input", or give the site its readers= and joined=; see docs/models.md.'
        )
    readers = [model.get_submodule(reader) for reader in site.readers]
    kinds = [NormOutputHook if is_norm(module) else SkipHook for module in readers]
    planned = zip(readers, kinds, strict=True)
    return [(module, kind(model, scaling, site, site.joined, module)) for module, kind in planned]


def attached_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, SkipHook]]:
    """Every skip hook at or below `model`, with its module."""
    for module in model.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for hook in {id(hook): hook for hook in hooks if isinstance(hook, SkipHook)}.values():
            yield module, hook


def adopt_hooks(network: nn.Module) -> None:
    """Make the hooks that use the network's scaling its own.

    Classes that rebuild themselves when they are copied, as EDM's do, leave them with a network that no longer exists.
    """
    held = network._modules.get(NAME)
    scalings = set() if held is None else set(held.modules())
    for _, hook in attached_hooks(network):
        if hook.module in scalings:
            hook.reference = weakref.ref(network)


def detach_hooks(model: nn.Module, kind: type[NetworkHook] = SkipHook) -> None:
    """Remove every hook of one kind at or below `model`."""
    # Found by type rather than through stored handles, which a deep copy or a pickle would leave behind.
    for module in model.modules():
        for hooks, *flags in hook_tables(module):
            for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
                for table in (hooks, *flags):
                    table.pop(key, None)


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


def hook_tables(module: nn.Module) -> tuple[tuple[dict, ...], tuple[dict, ...]]:
    """The tables of hooks, each with those of their flags."""
    return (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    )
