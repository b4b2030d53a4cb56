"""Where a long skip connection enters the network, and the hooks that multiply it there."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

NAME = "skip_scaling"
LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


@dataclass(frozen=True)
class Argument:
    """The skip arrives as an argument of the consumer, or as one item of it, counted from the end: -1 is the last.

    `position` counts the positional arguments after `self`; `name` is the keyword, for callers that use it.
    """

    position: int | None = None
    name: str | None = None
    item: int | None = None

    def __post_init__(self) -> None:
        if self.position is None and self.name is None:
            raise ValueError("Argument needs a position, a name, or both, to find the skip in the consumer's call")
        if self.item is not None and self.item >= 0:
            raise ValueError(f"Argument's item counts from the end, -1 being the last, got {self.item}")

    def __str__(self) -> str:
        where = self.name if self.name is not None else f"argument {self.position}"
        return where if self.item is None else f"{where}[{self.item}]"

    def changed(
        self, args: Arguments, kwargs: Keywords, change: Callable[[Any], Any]
    ) -> tuple[Arguments, Keywords] | None:
        """The arguments of a call, with `change` made to the skip unless it is None; None if the call is without it."""
        if self.name is not None and self.name in kwargs:
            return args, kwargs | {self.name: self._changed(kwargs[self.name], change)}
        if self.position is None or self.position >= len(args):
            return None
        value = self._changed(args[self.position], change)
        return (*args[: self.position], value, *args[self.position + 1 :]), kwargs

    def _changed(self, value: Any, change: Callable[[Any], Any]) -> Any:
        if value is None or self.item is None:
            return None if value is None else change(value)
        items = list(value)
        items[self.item] = None if items[self.item] is None else change(items[self.item])
        return tuple(items) if isinstance(value, tuple) else items


@dataclass(frozen=True)
class Channels:
    """The skip arrives already concatenated: channels `start` to `stop` of the consumer's first argument."""

    start: int
    stop: int
    dim: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"Channels needs 0 <= start < stop, got start={self.start}, stop={self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, joined: Tensor) -> Tensor:
        """The skip alone, a view."""
        return joined.narrow(self.dim, self.start, len(self))

    def __str__(self) -> str:
        return f"channels {self.start}:{self.stop}"


@dataclass(frozen=True)
class SkipSite:
    """One long skip connection, named by the module it enters.

    The first four fields are all that scaling needs. `readers` and `joined` say what happens to the skip next; with
    them a constant can be folded into weights, or placed after a normalisation that would cancel it.

    >>> SkipSite(index=1, consumer="decoder.3", entry=Channels(64, 128), width=64).channels
    64
    """

    index: int
    """i of the paper: 1 = outermost (nearest input and output) … N = innermost."""
    consumer: str
    """Path of the module that receives the skip, e.g. `up_blocks.3`."""
    entry: Argument | Channels
    """Where in the consumer's input the skip is."""
    width: int
    """Size of the skip's dimension 1, which the gates of LS weigh: channels (conv) or tokens (U-ViT)."""
    absorbed: bool = False
    """True if the consumer normalises the skip first, which cancels a constant."""
    readers: tuple[str, ...] = ()
    """Paths of the modules that first read the joined features (all of them, or none if unknown)."""
    joined: Channels | None = None
    """Where the skip lies in what the readers see; None if it was added, or changed before it was concatenated."""

    def __post_init__(self) -> None:
        if self.index < 1:
            raise ValueError(f"a site's index counts from 1 (outermost), got {self.index} for {self.consumer!r}")
        if self.width < 1:
            raise ValueError(f"a site's width must be positive, got {self.width} for {self.consumer!r}")
        if self.joined is None and isinstance(self.entry, Channels):
            object.__setattr__(self, "joined", self.entry)

    @property
    def channels(self) -> int:
        """Number of feature channels: the width of a conv skip, the token width of a U-ViT skip."""
        return len(self.joined) if self.joined is not None else self.width

    @property
    def channel_dim(self) -> int:
        """The dimension of the skip that holds its feature channels."""
        return self.joined.dim if self.joined is not None else 1

    def below(self, prefix: str) -> SkipSite:
        """The same site seen from a parent that holds the model under the name `prefix`."""
        consumer, *readers = (f"{prefix}.{path}" if prefix else path for path in (self.consumer, *self.readers))
        return replace(self, consumer=consumer, readers=tuple(readers))


def as_argument(module: nn.Module, key: int | str, item: int | None = None) -> Argument:
    """The argument of the module's forward with both its position and its name, where it has them."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if isinstance(key, int):
        return Argument(position=key, name=names[key] if key < len(names) else None, item=item)
    return Argument(position=names.index(key) if key in names else None, name=key, item=item)


def forward_parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def argument_of(module: nn.Module, entry: Argument | Channels) -> Argument:
    """The argument of the module's forward that holds the skip: the first one for channels."""
    return entry if isinstance(entry, Argument) else Argument(0, next(iter(forward_parameters(module)), None))


def is_norm(module: nn.Module) -> bool:
    """Whether the module normalises its input, judged by its class name (GroupNorm32, AdaGN, RMSNorm …)."""
    names = [kind.__name__.lower() for kind in type(module).__mro__]
    return any(re.search(r"norm(\d+d?)?$|^adagn$", name) for name in names)


def runs_as(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether the module is one of these kinds with its forward unchanged (a weight-normalised subclass is not)."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def number_from_innermost(sites: list[dict[str, Any]]) -> list[SkipSite]:
    """Give the sites of one forward pass, in joining order, the paper's index; returned outermost first."""
    return [SkipSite(index=index, **fields) for index, fields in enumerate(reversed(sites), start=1)]


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

    def __init__(
        self, network: nn.Module, scaling: nn.Module, site: SkipSite, entry: Argument | Channels, reads: nn.Module
    ) -> None:
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
        return [(module, SkipHook(model, scaling, site, site.entry, module))]
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
