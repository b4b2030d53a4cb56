"""Where a long skip connection enters the network."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

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
class Inline:
    """The skip is joined in the consumer's own forward, where no module is given it: one part of one of its joins.

    Counted are the joins of one kind, of features with as many dimensions, that the forward makes itself; those of the
    modules that it calls are not.
    """

    kind: str
    """"cat" for a concatenation; "add" for a sum, a difference or an interpolation of two tensors."""
    part: int
    """Which of the joined tensors the skip is, from 0."""
    number: int
    """Which of these joins it is, from 1."""
    total: int
    """How many of them one call makes. With another number than this it would not be known which one is meant."""
    ndim: int = 4

    def __post_init__(self) -> None:
        if self.kind not in ("cat", "add"):
            raise ValueError(f"Inline's kind must be 'cat' or 'add', got {self.kind!r}")
        if not 1 <= self.number <= self.total or self.part < 0 or self.ndim < 1:
            raise ValueError(f"Inline needs part >= 0, 1 <= number <= total and ndim >= 1, got {self!r}")

    def __str__(self) -> str:
        return f"part {self.part} of {'concatenation' if self.kind == 'cat' else 'sum'} {self.number} of {self.total}"


Entry = Argument | Channels | Inline


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
    entry: Entry
    """Where in the consumer's input the skip is, or at which join of its forward."""
    width: int
    """Size of the skip's dimension 1, which the gates of LS weigh: channels (conv) or tokens (U-ViT)."""
    absorbed: bool = False
    """True if the consumer normalises the skip first, which cancels a constant."""
    readers: tuple[str, ...] = ()
    """Paths of the modules that first read the joined features (all of them, or none if unknown)."""
    joined: Channels | None = None
    """Where the skip lies in what the readers see; None if it was added, or changed before it was concatenated."""
    last: int | None = None
    """Number of feature channels of a skip that is added and has them in its last dimension, as tokens do."""
    varies: bool = False
    """True if the width follows the size of the input, such as the length of a sequence: no gate can weigh it."""
    factor: float = 1.0
    """The number by which the network itself multiplies the skip, such as 1/√2."""

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
        return len(self.joined) if self.joined is not None else self.last or self.width

    @property
    def channel_dim(self) -> int:
        """The dimension of the skip that holds its feature channels."""
        return self.joined.dim if self.joined is not None else -1 if self.last else 1

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
