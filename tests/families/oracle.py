"""What a real forward pass joins, recorded without any of the code under test.

A family declares in words of its own library where its long skips are joined (`Join`). The oracle watches every
concatenation and addition of one forward pass and keeps those that the declaration names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Run = Callable[[nn.Module, Any], Tensor]

CONCATENATIONS = {"cat", "concat", "concatenate"}
ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
# Functions that hand on the same features: their result counts as old as their argument.
RENAMINGS = {"clone", "contiguous", "float", "to", "type", "permute", "transpose", "mul", "__mul__", "__rmul__", "pad"}


@dataclass(frozen=True, eq=False)
class Joined:
    """Two or more tensors that were concatenated or added."""

    op: str
    """`cat` or `add`."""
    parts: tuple[Tensor, ...]
    """Copies of what was joined."""
    dim: int | None
    """The dimension of a concatenation."""
    path: str
    """Path of the innermost module at work; the model itself is the empty string."""
    done: frozenset[str]
    """Paths of the modules that had returned at least once."""
    born: tuple[int, ...]
    """When each part was made, in operations since the start; 0 for inputs and parameters."""
    identity: tuple[int, ...]
    """`id` of each part: equal for a tensor that is joined again."""
    skip_at: int = 1
    received: list[str] = field(default_factory=list)
    """Paths of the modules that were given the joined tensor, from the outside in."""

    @property
    def skip(self) -> Tensor:
        return self.parts[self.skip_at]

    @property
    def trunk(self) -> Tensor:
        return self.parts[1 - self.skip_at]

    @property
    def readers(self) -> list[str]:
        """The innermost of the modules that received the joined tensor: those that compute with it."""
        return [path for path in self.received if not any(other.startswith(f"{path}.") for other in self.received)]


@dataclass(frozen=True)
class Join:
    """A declaration: long skips are joined by `op` inside modules whose path matches `path`.

    `skip_at` says which part is the skip; with `after`, joins count only once that module has returned.
    """

    path: str = ""
    op: str = "cat"
    skip_at: int = 1
    after: str | None = None

    def describes(self, joined: Joined) -> bool:
        if joined.op != self.op or len(joined.parts) != 2:
            return False
        if self.after is not None and self.after not in joined.done:
            return False
        return re.fullmatch(self.path, joined.path) is not None


class Site(Protocol):
    """What a found site must tell; see `scalelong.skips.site`."""

    @property
    def index(self) -> int: ...
    @property
    def consumer(self) -> str: ...
    @property
    def entry(self) -> Any: ...
    @property
    def width(self) -> int: ...


class _Watch(TorchFunctionMode):
    """Records joins; with coefficients, innermost first, also multiplies the skip of every join it was told of."""

    def __init__(self, where: Join | None, coefficients: Sequence[float] | None = None) -> None:
        super().__init__()
        self.where = where
        self.coefficients = coefficients
        self.stack: list[str] = []
        self.done: set[str] = set()
        self.joins: list[Joined] = []
        self.born: dict[int, int] = {}
        self.results: dict[int, Joined] = {}
        self.kept: list[Tensor] = []  # an id is only an identity while its tensor lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        joined = self._joined(name, args, kwargs)
        if joined is not None and self.coefficients is not None:
            args = self._scaled(name, args, joined)
        result = func(*args, **kwargs)
        sources = [argument for argument in args if isinstance(argument, Tensor)]
        for tensor in _tensors(result):
            self._remember(tensor, sources[0] if name in RENAMINGS and len(sources) == 1 else None)
            if joined is not None:
                self.results[id(tensor)] = joined
        return result

    def _remember(self, tensor: Tensor, source: Tensor | None) -> None:
        self.kept.append(tensor)
        if source is None:
            self.born.setdefault(id(tensor), len(self.kept))
            return
        self.born.setdefault(id(tensor), self.born.get(id(source), 0))
        if id(source) in self.results:
            self.results[id(tensor)] = self.results[id(source)]

    def _joined(self, name: str, args: Any, kwargs: Any) -> Joined | None:
        op = "cat" if name in CONCATENATIONS else "add" if name in ADDITIONS else None
        if op is None:
            return None
        parts = args[0] if op == "cat" else args[:2]
        if len(parts) < 2 or not all(isinstance(part, Tensor) and part.is_floating_point() for part in parts):
            return None
        if op == "add" and parts[0].shape != parts[1].shape:
            return None
        joined = Joined(
            op=op,
            parts=tuple(part.detach().clone() for part in parts),
            dim=(kwargs.get("dim", args[1] if len(args) > 1 else 0)) if op == "cat" else None,
            path=self.stack[-1] if self.stack else "",
            done=frozenset(self.done),
            born=tuple(self.born.get(id(part), 0) for part in parts),
            identity=tuple(id(part) for part in parts),
            skip_at=1 if self.where is None else self.where.skip_at,
        )
        if self.where is not None and not self.where.describes(joined):
            return None
        self.joins.append(joined)
        return joined

    def _scaled(self, name: str, args: Any, joined: Joined) -> Any:
        assert self.coefficients is not None
        coefficient = self.coefficients[len(_once_each(self.joins)) - 1]
        parts = list(args[0] if name in CONCATENATIONS else args[:2])
        parts[joined.skip_at] = parts[joined.skip_at] * coefficient
        return (parts, *args[1:]) if name in CONCATENATIONS else (*parts, *args[2:])

    def entered(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stack.append(path)
        for tensor in _tensors([*args, *kwargs.values()]):
            if id(tensor) in self.results:
                self.results[id(tensor)].received.append(path)

    def left(self, path: str, output: Any) -> None:
        self.stack.pop()
        self.done.add(path)
        for tensor in _tensors(output):
            joined = self.results.get(id(tensor))
            if joined is not None and path in joined.received:
                joined.received.remove(path)  # it only passed the tensor on


def record_joins(model: nn.Module, inputs: Any, run: Run, where: Join | None = None) -> list[Joined]:
    """The joins of one forward pass, in order; with `where`, the long skips it declares, each skip once."""
    watch = _Watch(where)
    _run_watched(model, inputs, run, watch)
    return watch.joins if where is None else _once_each(watch.joins)


def run_scaled(model: nn.Module, inputs: Any, run: Run, where: Join, coefficients: Sequence[float]) -> Tensor:
    """The output when the i-th long skip (1 = outermost) is multiplied by `coefficients[i - 1]` where it is joined."""
    return _run_watched(model, inputs, run, _Watch(where, coefficients[::-1]))


def skips_seen(model: nn.Module, sites: Sequence[Site], inputs: Any, run: Run) -> list[Tensor]:
    """For each site, a copy of what enters its consumer there in one forward pass.

    A consumer that is called again must be given the same values again.
    """
    seen: list[list[Tensor]] = [[] for _ in sites]
    handles = []
    for site, found in zip(sites, seen, strict=True):

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], site=site, found=found) -> None:
            found.append(_entering(site.entry, args, kwargs).detach().clone())

        handles.append(model.get_submodule(site.consumer).register_forward_pre_hook(keep, with_kwargs=True))
    try:
        run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    for site, found in zip(sites, seen, strict=True):
        assert found, f"{site.consumer} was never called"
        assert all(torch.equal(found[0], again) for again in found), f"{site.consumer} was given different skips"
    return [found[0] for found in seen]


def disagreements(sites: Sequence[Site], seen: Sequence[Tensor], joins: Sequence[Joined]) -> list[str]:
    """In words, everything in which found sites differ from the recorded joins; empty if they agree."""
    if len(sites) != len(joins):
        return [f"{len(sites)} sites were found, {len(joins)} long skips were joined"]
    if [site.index for site in sites] != list(range(1, len(sites) + 1)):
        return [f"indices {[site.index for site in sites]} do not run from 1 (outermost) to {len(sites)}"]
    wrong = []
    for site, tensor, joined in zip(sites, seen, reversed(joins), strict=True):
        where = f"site {site.index} at {site.consumer} {site.entry}"
        if not torch.equal(tensor, joined.skip):
            wrong.append(f"{where} is not the skip of shape {tuple(joined.skip.shape)} joined in {joined.path!r}")
        elif site.width != joined.skip.shape[1]:
            wrong.append(f"{where} has width {site.width}, the skip has {joined.skip.shape[1]}")
    return wrong


def _run_watched(model: nn.Module, inputs: Any, run: Run, watch: _Watch) -> Tensor:
    with torch.no_grad(), _watched_modules(model, watch), watch:
        return run(model, inputs)


@contextmanager
def _watched_modules(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Tell the watch which module is at work."""
    handles = []
    for path, module in model.named_modules():

        def enter(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            watch.entered(path, args, kwargs)

        def leave(_: nn.Module, args: Any, output: Any, path: str = path) -> None:
            watch.left(path, output)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _once_each(joins: Sequence[Joined]) -> list[Joined]:
    """The joins without those that use a skip of an earlier one again."""
    first: dict[int, Joined] = {}
    for joined in joins:
        first.setdefault(joined.identity[joined.skip_at], joined)
    return list(first.values())


def _entering(entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor at an entry: a slice of the first argument, or an argument, or an item of one."""
    if hasattr(entry, "start"):
        joined = args[0] if args else next(iter(kwargs.values()))
        return joined.narrow(entry.dim, entry.start, entry.stop - entry.start)
    value = kwargs[entry.name] if entry.name in kwargs else args[entry.position]
    return value if entry.item is None else value[entry.item]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
