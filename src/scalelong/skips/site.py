"""Where a long skip connection enters the network."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


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
