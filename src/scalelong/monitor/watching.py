"""The hooks that read a training step: features, gradients and coefficients, as sums that stay on the device.

They are attached for the steps that are read and for no others, and change no number of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..skips import Argument, Channels, SkipSite
from ..skips.apply import scaled_networks
from ..skips.hooks import NAME, forward_parameters
from .tally import Tally
from .team import Team

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
ALONE = Team()


def blocks_of(network: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The network's parts that have weights, by path; of a list or a dict of modules its entries."""
    found: dict[str, nn.Module] = {}
    for name, child in network.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, CONTAINERS):
            found |= blocks_of(child, f"{path}.")
        elif name != NAME and next(child.parameters(), None) is not None:
            found[path] = child
    return found


@dataclass(frozen=True)
class Call:
    """How the network was called last, to call it so again: its arguments and the precision of autocast, if any."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None


class Hook:
    """A hook that a copy of the model does not take along: copies are not watched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        # A pass without gradients is an evaluation, a sample or a probe, not the step that is read.
        return self.function(*args) if torch.is_grad_enabled() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return ignore

    def __reduce__(self) -> tuple[Any, ...]:
        return inert, ()


def ignore(*args: Any) -> None:
    """What a hook becomes in a copy."""


def inert() -> Callable[..., None]:
    return ignore


class Watch:
    """Reads the steps during which it is attached, all passes of one that is trained in parts, into a tally."""

    def __init__(self, network: nn.Module, sites: Sequence[SkipSite], scaler: Any = None, team: Team = ALONE) -> None:
        self.network, self.sites, self.scaler, self.team = network, sites, scaler, team
        self.blocks = blocks_of(network)
        of_skips = [f"skip{site.index}/{name}" for site in sites for name in ("feature", "gradient", "share")]
        self.names = [*of_skips, *(f"block/{name}/feature" for name in self.blocks)]
        self.tally = Tally()
        self.order: dict[str, None] = {}
        """The blocks in the order in which they ended."""
        self.call: Call | None = None
        self.loss_scale = 1.0
        self.handles = ExitStack()

    def attach(self) -> None:
        enter = self.handles.enter_context
        enter(self.network.register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
        for name, block in self.blocks.items():
            enter(block.register_forward_hook(Hook(self._read_block(name))))
        for _, scaling in scaled_networks(self.network):
            enter(scaling.register_forward_hook(Hook(self._read_coefficient)))
        for site in self.sites:
            consumer = self.network.get_submodule(site.consumer)
            # Registered after the hook that scales the skip, and so called after it.
            hook = Hook(self._read_skip(site, forward_parameters(consumer)))
            enter(consumer.register_forward_pre_hook(hook, with_kwargs=True))
            if site.readers and site.joined is not None:
                reader = self.network.get_submodule(site.readers[0])
                enter(reader.register_forward_pre_hook(Hook(self._read_joined(site, site.joined))))

    def detach(self) -> None:
        self.handles.close()
        self.tally.clear()
        self.call = None

    def values(self) -> dict[str, Tensor]:
        """What was read since it was attached, over the whole batch; nothing if there was no pass."""
        return self.tally.values(self.names, self.team) if self.tally.sums else {}

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = next(module.parameters()).device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.call = Call(args, kwargs, autocast)
        self.loss_scale = 1.0 if self.scaler is None else self.scaler.get_scale()

    def _read_block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            features = next(tensors_in(output), None)
            if features is not None:
                self.order.setdefault(name)
                self._note_feature(f"block/{name}/feature", features)

        return hook

    def _read_coefficient(self, module: nn.Module, args: tuple[Any, ...], output: Tensor | float) -> None:
        values = torch.as_tensor(output, device=args[1].device).detach().float().flatten()
        self.tally.add_coefficients(args[0], values)

    def _read_skip(self, site: SkipSite, parameters: list[str]) -> Callable[..., Any]:
        entry = site.entry

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if isinstance(entry, Channels):
                self._read_channels(site, entry, args[0] if args else kwargs[parameters[0]])
                return None
            return self._read_argument(site, entry, parameters, args, kwargs)

        return hook

    def _read_channels(self, site: SkipSite, entry: Channels, joined: Tensor) -> None:
        self._note_feature(f"skip{site.index}/feature", part(joined, entry))
        self._note_share(site, part(joined, entry), joined)
        if joined.requires_grad:
            joined.register_hook(lambda gradient: self._note_gradient(site, part(gradient, entry)))

    def _read_argument(
        self, site: SkipSite, entry: Argument, parameters: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Read the skip and hand on a view of it, whose gradient is that of this way alone, without the trunk's."""
        key = entry.name if entry.name in kwargs else entry.position
        given = kwargs.get(key) if isinstance(key, str) else args[key] if key is not None and key < len(args) else None
        skip = given if entry.item is None or given is None else given[entry.item]
        if not isinstance(skip, Tensor):
            return None
        self._note_feature(f"skip{site.index}/feature", skip)
        trunk = args[0] if args else kwargs.get(parameters[0])
        if not site.readers and entry.item in (None, -1) and isinstance(trunk, Tensor):
            self._note_share(site, skip, trunk, skip)
        if not skip.requires_grad:
            return None
        seen = skip.view_as(skip)
        seen.register_hook(lambda gradient: self._note_gradient(site, gradient))
        return with_argument(args, kwargs, key, replaced(given, entry.item, seen))

    def _read_joined(self, site: SkipSite, joined: Channels) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                self._note_share(site, part(args[0], joined), args[0])

        return hook

    def _note_feature(self, name: str, features: Tensor) -> None:
        self.tally.add_features(name, energies(features))

    def _note_share(self, site: SkipSite, skip: Tensor, *joined: Tensor) -> None:
        total = torch.stack([energy(features) for features in joined]).sum()
        self.tally.add(f"skip{site.index}/share", energy(skip), total)

    def _note_gradient(self, site: SkipSite, gradient: Tensor) -> None:
        # Each process has the loss of its own images, and the gradient is that of the mean of these losses.
        own = norm(gradient) / (self.loss_scale * self.team.size)
        self.tally.add(f"skip{site.index}/gradient", own.square())


def norm(tensor: Tensor) -> Tensor:
    """The 2-norm in float32, whatever the precision of the features. Shape: ()."""
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)


def energy(tensor: Tensor) -> Tensor:
    """The squared 2-norm. Shape: ()."""
    return norm(tensor).square()


def energies(features: Tensor) -> Tensor:
    """The squared 2-norm of each image's features. Shape: (B, …) → (B,), float32."""
    if features.ndim < 2:
        return features.detach().float().square().reshape(-1)
    dims = tuple(range(1, features.ndim))
    return torch.linalg.vector_norm(features.detach(), dim=dims, dtype=torch.float32).square()


def part(joined: Tensor, channels: Channels) -> Tensor:
    return joined.narrow(channels.dim, channels.start, len(channels))


def replaced(given: Any, item: int | None, skip: Tensor) -> Any:
    """The argument with the skip in its place."""
    if item is None:
        return skip
    items = list(given)
    items[item] = skip
    return tuple(items) if isinstance(given, tuple) else items


def with_argument(args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, value: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(key, str):
        return args, kwargs | {key: value}
    return (*args[:key], value, *args[key + 1 :]), kwargs


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, tuple | list):
        for item in output:
            yield from tensors_in(item)
    elif hasattr(output, "sample"):
        yield from tensors_in(output.sample)
