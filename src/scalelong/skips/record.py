"""Run a model once and record which tensor was made from which, and inside which module's call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..utils.runtime import tensors_in
from .site import Channels

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

    def outward(self) -> Iterator[Call]:
        """This call, the one it was made in, and so on to the model's own."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def received(self, values: set[int]) -> bool:
        return any(given.value in values for given in self.given)


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


@dataclass
class Record:
    """Everything one forward pass computed from its inputs; constants and parameters are left out."""

    model: nn.Module
    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    output: tuple[int, ...] = ()
    """Shape of what the model returned; of several tensors, of the one with the most dimensions."""

    def lineage(self, value: int) -> int:
        """The value and all it depends on, as a bit mask."""
        return self.values[value].ancestors | 1 << value

    def depends(self, value: int, on: int) -> bool:
        """Whether `value` was computed from `on`, or is it."""
        return bool(self.lineage(value) >> on & 1)

    def paths(self) -> dict[nn.Module, str]:
        return {module: path for path, module in self.model.named_modules()}

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
        # Weak, so that tracing needs no more memory than a forward pass.
        self.numbers = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [self.numbers[tensor] for tensor in tensors_in((args, kwargs)) if tensor in self.numbers]
        operation = func.overloadpacket.__name__
        parts, order = self.parts_of(operation, args, kwargs), order_of(operation, args)
        output = func(*args, **kwargs)
        # What depends on no input of the model (positions, masks …) is a constant and gets no number.
        if inputs:
            for tensor in tensors_in(output):
                self.number(tensor, operation, inputs, parts, order)
        return output

    def number(
        self, tensor: Tensor, operation: str, inputs: Sequence[int] = (), parts: Parts = (), order: Dims = ()
    ) -> None:
        values = self.record.values
        ancestors = reduce(or_, map(self.record.lineage, self.carried(operation, inputs)), 0)
        values.append(Value(operation, tuple(inputs), ancestors, tensor.shape, self.call, parts, order))
        self.numbers[tensor] = len(values) - 1
        # Writing into a slice changes the tensor that was sliced, too.
        if operation.endswith("_") and tensor._base is not None:
            self.numbers[tensor._base] = len(values) - 1

    def carried(self, operation: str, inputs: Sequence[int]) -> Sequence[int]:
        """The inputs whose features the output carries on: an attention gate only weighs them."""
        if operation not in ("mul", "mul_"):
            return inputs
        return [value for value in inputs if self.record.values[value].operation not in GATES] or inputs

    def parts_of(self, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parts:
        """The values that a concatenation of channels, or a sum of equal shapes, joins; empty for all else."""
        if operation == "cat":
            return tuple(self.concatenated(args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)))
        terms = [arg for arg in args[:2] if isinstance(arg, Tensor)]
        if operation not in ("add", "add_") or len(terms) < 2 or terms[0].shape != terms[1].shape:
            return ()
        return tuple(Part(self.numbers[term], None) for term in terms if term in self.numbers)

    def concatenated(self, tensors: Sequence[Tensor], dim: int) -> Iterator[Part]:
        ndim = max(tensor.ndim for tensor in tensors)
        dim = dim % ndim if ndim else 0
        # Channels are dimension 1 of images and signals, the last one of tokens.
        if dim != 1 and (dim != ndim - 1 or ndim < 3):
            return
        start = 0
        for tensor in tensors:
            width = tensor.shape[dim] if tensor.ndim == ndim else 0
            if width and tensor in self.numbers:
                yield Part(self.numbers[tensor], Channels(start, start + width, dim=1 if dim == 1 else -1))
            start += width

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


def order_of(operation: str, args: tuple[Any, ...]) -> Dims:
    """How a permute or a transpose reorders the dimensions; empty for all else."""
    if operation not in ("permute", "transpose"):
        return ()
    order = list(range(args[0].ndim))
    if operation == "permute":
        return tuple(order[dim] for dim in args[1])
    order[args[1]], order[args[2]] = order[args[2]], order[args[1]]
    return tuple(order)


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
        output = model(*args, **kwargs)
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
