"""Run a model once and record which tensor was made from which, and inside which module's call."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..utils.runtime import tensors_in
from .inline import KINDS, Joined, Key
from .site import Channels, Keywords

SUMS = ("add", "add_", "sub", "sub_", "lerp", "lerp_")
GATES = ("sigmoid", "sigmoid_", "hardsigmoid", "hardsigmoid_")


class Given(NamedTuple):
    """One tensor among a call's arguments: which argument, which item of it (from the end), and its value's number."""

    key: int | str
    item: int | None
    value: int


class Part(NamedTuple):
    """One of the values that an operation joins, and its channels in a concatenation (None in a sum)."""

    value: int
    channels: Channels | None
    number: int


Parts = tuple[Part, ...]
Dims = tuple[int, ...]


@dataclass(eq=False)
class Call:
    """One call of a module. Values number `start` to `end` (exclusive) were made inside it."""

    module: nn.Module
    parent: Call | None
    start: int
    given: list[Given]
    end: int = -1
    joins: Counter[Key] = field(default_factory=Counter)
    """How many joins of each kind its own code made."""

    def outward(self) -> Iterator[Call]:
        """This call, the one it was made in, and so on to the model's own."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def received(self, values: set[int]) -> bool:
        return any(given.value in values for given in self.given)


@dataclass(frozen=True)
class Place:
    """Which of its kind a join is among those that one call's own code makes, and the values that it joins."""

    key: Key
    number: int
    parts: tuple[int | None, ...]


@dataclass(frozen=True)
class Value:
    """What one tensor held between two changes, numbered by birth; bit n of `ancestors` is set if it depends on n."""

    operation: str
    inputs: tuple[int, ...]
    ancestors: int
    shape: torch.Size
    call: Call | None
    parts: Parts = ()
    order: Dims = ()
    """The input's dimensions in the order of the output's, of an operation that only reorders them."""
    factor: float | None = None
    """The number that the operation multiplies its input by, if that is all it does."""
    place: Place | None = None
    """Of a join, as the code that makes it sees it; None for other operations, and inside of scripted functions."""


@dataclass
class Record:
    """Everything one forward pass computed from its inputs; constants and parameters are left out."""

    model: nn.Module
    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    results: set[int] = field(default_factory=set)
    """The values that the model returned."""
    output: tuple[int, ...] = ()
    """Shape of what the model returned; of several tensors, of the one with the most dimensions."""

    def lineage(self, value: int) -> int:
        """The value and all it depends on, as a bit mask."""
        return self.values[value].ancestors | 1 << value

    def depends(self, value: int, on: int) -> bool:
        """Whether `value` was computed from `on`, or is it."""
        return bool(self.lineage(value) >> on & 1)

    def is_used(self, value: int) -> bool:
        """Whether what the model returned carries the value on."""
        return not self.results or any(self.depends(result, on=value) for result in self.results)

    def paths(self) -> dict[nn.Module, str]:
        return {module: path for path, module in self.model.named_modules()}

    def describe(self, module: nn.Module) -> str:
        path = self.paths()[module]
        return f"{path!r} ({type(module).__name__})" if path else f"the forward of {type(module).__name__}"

    def call_of(self, value: int) -> Call:
        call = self.values[value].call
        assert call is not None, "operations are recorded inside the model's own call"
        return call

    def way_between(self, origin: int, value: int) -> Iterator[int]:
        """The values through which `value` was made from `origin`, in order of birth."""
        lineage = self.lineage(value)
        return (n for n in range(origin + 1, value + 1) if lineage >> n & 1 and self.depends(n, origin))


class Recorder(TorchDispatchMode):
    """Numbers every tensor that an operation makes or changes while the mode is active.

    It watches below autograd, where scripted functions, `torch.concat`, `+=` and their like come down to few of them.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        self.call: Call | None = None
        self.place: Place | None = None
        # Weak, so that tracing needs no more memory than a forward pass.
        self.numbers = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [self.numbers[tensor] for tensor in tensors_in((args, kwargs)) if tensor in self.numbers]
        operation = func.overloadpacket.__name__
        kept = self.parts_kept(*args) if operation == "slice" else ()
        about: Keywords = {"order": order_of(operation, args), "factor": factor_of(operation, args), "kept": kept}
        parts = self.parts_of(operation, args, kwargs)
        output = func(*args, **kwargs)
        # What depends on no input of the model (positions, masks …) is a constant and gets no number.
        if inputs:
            for tensor in tensors_in(output):
                self.number(tensor, operation, inputs, parts, **about)
        return output

    def number(
        self, tensor: Tensor, operation: str, inputs: Sequence[int] = (), parts: Parts = (), **about: Any
    ) -> None:
        values = self.record.values
        carried = self.carried(operation, inputs, about.pop("kept", ()))
        ancestors = reduce(or_, map(self.record.lineage, carried), 0)
        place = self.place if parts else None
        values.append(Value(operation, tuple(inputs), ancestors, tensor.shape, self.call, parts, place=place, **about))
        self.numbers[tensor] = len(values) - 1
        # Writing into a slice changes the tensor that was sliced, too.
        if operation.endswith("_") and tensor._base is not None:
            self.numbers[tensor._base] = len(values) - 1

    def carried(self, operation: str, inputs: Sequence[int], kept: Sequence[int] = ()) -> Sequence[int]:
        """The values whose features the output carries on: an attention gate only weighs them."""
        if kept:
            return kept
        if operation not in ("mul", "mul_"):
            return inputs
        return [value for value in inputs if self.record.values[value].operation not in GATES] or inputs

    def parts_of(self, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parts:
        """The values that a concatenation of channels, or a sum of equal shapes, joins; empty for all else."""
        if operation == "cat":
            return tuple(self.concatenated(args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)))
        terms = [arg for arg in args[:2] if isinstance(arg, Tensor)]
        if operation not in SUMS or len(terms) < 2 or terms[0].shape != terms[1].shape:
            return ()
        return tuple(Part(self.numbers[term], None, i) for i, term in enumerate(terms) if term in self.numbers)

    def concatenated(self, tensors: Sequence[Tensor], dim: int) -> Iterator[Part]:
        ndim = max(tensor.ndim for tensor in tensors)
        dim = dim % ndim if ndim else 0
        # Channels are dimension 1 of images and signals, the last one of tokens.
        if dim != 1 and (dim != ndim - 1 or ndim < 3):
            return
        start = 0
        for index, tensor in enumerate(tensors):
            width = tensor.shape[dim] if tensor.ndim == ndim else 0
            if width and tensor in self.numbers:
                yield Part(self.numbers[tensor], Channels(start, start + width, dim=1 if dim == 1 else -1), index)
            start += width

    def parts_kept(
        self, joined: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, *step: int
    ) -> Dims:
        """The joined values that a slice of a concatenation keeps; empty for a slice of anything else."""
        parts = self.record.values[self.numbers[joined]].parts if joined in self.numbers else ()
        first, last, _ = slice(start, end, *step).indices(joined.shape[dim])
        along = [part for part in parts if part.channels and (part.channels.dim - dim) % joined.ndim == 0]
        return tuple(part.value for part in along if part.channels.start < last and first < part.channels.stop)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of every module."""
        arguments = [*enumerate(args), *kwargs.items()]
        given = [place for key, argument in arguments for place in self.places(key, argument)]
        self.call = Call(module, self.call, len(self.record.values), given)
        self.record.calls.append(self.call)

    def places(self, key: int | str, argument: Any) -> Iterator[Given]:
        items = argument if isinstance(argument, (tuple, list)) else [argument]
        for position, item in enumerate(items):
            if isinstance(item, Tensor) and item in self.numbers:
                yield Given(key, None if item is argument else position - len(items), self.numbers[item])

    def leave(self, module: nn.Module, *_: Any) -> None:
        """Forward hook of every module."""
        # A call that ended in an exception which the model caught never got here: close it with its caller.
        while self.call is not None:
            call, self.call = self.call, self.call.parent
            call.end = len(self.record.values)
            if call.module is module:
                return


class JoinCounter(TorchFunctionMode):
    """Tells the recorder which join of its call's own code is at work, as `inline.JoinMode` will count them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder, kind = self.recorder, KINDS.get(func)
        joined = None if kind is None else Joined(kind, args, kwargs)
        if joined is None or joined.key is None or recorder.call is None:
            return func(*args, **kwargs)
        recorder.call.joins[joined.key] += 1
        parts = tuple(recorder.numbers.get(part) for part in joined.parts)
        recorder.place = Place(joined.key, recorder.call.joins[joined.key], parts)
        try:
            return func(*args, **kwargs)
        finally:
            recorder.place = None


def order_of(operation: str, args: tuple[Any, ...]) -> Dims:
    """How a permute or a transpose reorders the dimensions; empty for all else."""
    if operation not in ("permute", "transpose"):
        return ()
    order = list(range(args[0].ndim))
    if operation == "permute":
        return tuple(order[dim] for dim in args[1])
    order[args[1]], order[args[2]] = order[args[2]], order[args[1]]
    return tuple(order)


def factor_of(operation: str, args: tuple[Any, ...]) -> float | None:
    """The number that a product or quotient multiplies a tensor by; None for all else."""
    numbers = [arg for arg in args[:2] if isinstance(arg, (int, float))]
    if operation not in ("mul", "mul_", "div", "div_") or len(numbers) != 1 or isinstance(args[0], (int, float)):
        return None
    return numbers[0] if operation.startswith("mul") else 1 / numbers[0] if numbers[0] else None


def record_forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Record:
    """Run `model(*args, **kwargs)` once, in evaluation mode, and leave the model and the random state as they were."""
    record = Record(model)
    recorder = Recorder(record)
    # In the order of the model's signature, however they are given.
    arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    for tensor in tensors_in(arguments):
        recorder.number(tensor, "input")
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(unchanged(model))
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # which accepts no hooks
                stack.callback(module.register_forward_pre_hook(recorder.enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(recorder.leave).remove)
        stack.enter_context(recorder)
        stack.enter_context(JoinCounter(recorder))
        output = model(*args, **kwargs)
    record.results = {recorder.numbers[tensor] for tensor in tensors_in(output) if tensor in recorder.numbers}
    record.output = max((tuple(tensor.shape) for tensor in tensors_in(output)), key=len, default=())
    return record


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; afterwards restore every module's mode, the buffers and the random state."""
    modes = [(module, module.training) for module in model.modules()]
    tables = [(module._buffers, dict(module._buffers)) for module, _ in modes]
    copies = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    gpus = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(gpus)):
        try:
            # Flags are set directly: some models override train() to freeze or merge weights.
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training
            for table, before in tables:
                table.update(before)
            for buffer, saved in copies.items():
                if not buffer.is_meta and not torch.equal(buffer, saved):
                    buffer.copy_(saved)
