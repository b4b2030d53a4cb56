"""Reach a tensor where a module's own forward joins it, with no module in between that is given it.

A mode of torch watches the forward while it runs and hands one part of one join, a concatenation or a sum, to whoever
asked for it. The trunk is not touched, nor is the tensor itself, which feeds the trunk as well.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from .site import Inline

Key = tuple[str, int]
"""What joins are counted by: their kind and the number of dimensions."""


def functions_named(*names: str) -> list[Any]:
    return [getattr(owner, name) for owner in (torch, Tensor) for name in names if hasattr(owner, name)]


KINDS: dict[Any, str] = {function: "cat" for function in functions_named("cat", "concat", "concatenate", "hstack")}
KINDS |= {f: "add" for f in functions_named("add", "add_", "sub", "sub_", "subtract", "subtract_", "lerp", "lerp_")}
# The names of the tensors that a sum joins, for callers that use keywords.
TERMS = (("input",), ("other", "end"))


class Joined:
    """The tensors that one call of a function joins."""

    def __init__(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kind, self.args, self.kwargs = kind, args, kwargs
        if kind == "cat":
            self.parts: Sequence[Any] = args[0] if args else kwargs["tensors"]
        else:
            self.parts = [args[i] if i < len(args) else named(kwargs, names) for i, names in enumerate(TERMS)]

    @property
    def key(self) -> Key | None:
        """None for what is no join of features: of numbers, indices, or shapes that differ in their dimensions."""
        tensors = [part for part in self.parts if isinstance(part, Tensor) and part.is_floating_point()]
        dims = {tensor.ndim for tensor in tensors}
        alone = len(tensors) < 2 or len(tensors) < len(self.parts) or len(dims) > 1
        return None if alone else (self.kind, dims.pop())

    def changed(self, part: int, change: Callable[[Tensor], Tensor]) -> Joined:
        """The same call with `change` made to one of its tensors."""
        parts = [change(value) if i == part else value for i, value in enumerate(self.parts)]
        if self.kind != "cat":
            given = min(len(self.args), 2)
            late = {name: parts[i] for i, names in enumerate(TERMS) for name in names if name in self.kwargs}
            return Joined(self.kind, (*parts[:given], *self.args[2:]), self.kwargs | late)
        if self.args:
            return Joined(self.kind, (parts, *self.args[1:]), self.kwargs)
        return Joined(self.kind, (), self.kwargs | {"tensors": parts})


def named(kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((kwargs[name] for name in names if name in kwargs), None)


class JoinMode(TorchFunctionMode):
    """Counts the joins that one call of a module's forward makes, and changes those parts that it was told to."""

    def __init__(self, module: nn.Module, frame: FrameType) -> None:
        super().__init__()
        self.module, self.frame, self.training = module, frame, torch.is_grad_enabled()
        self.wanted: list[tuple[Inline, Callable[[Tensor], Tensor]]] = []
        self.counts: Counter[Key] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        joined = Joined(kind, args, kwargs or {})
        key = joined.key
        if key is not None and is_direct(self.frame):
            self.counts[key] += 1
            for entry, change in self.wanted:
                if (entry.kind, entry.ndim) == key and entry.number == self.counts[key]:
                    joined = self.change(joined, entry, change)
        return func(*joined.args, **joined.kwargs)

    def change(self, joined: Joined, entry: Inline, change: Callable[[Tensor], Tensor]) -> Joined:
        if self.training and is_checkpointed(self.frame):
            raise ValueError(
                f"the forward of {type(self.module).__name__} joins a scaled skip ({entry}) in a function given "
                "to torch.utils.checkpoint, which would repeat it later without the scaling. "
                "Checkpoint a module instead, or join the skip outside of that function."
            )
        return joined.changed(entry.part, change)

    def check(self) -> None:
        """Raise if the call made another number of joins than was counted when the skips were found."""
        for entry, _ in self.wanted:
            found = self.counts[entry.kind, entry.ndim]
            if found != entry.total:
                raise ValueError(
                    f"the forward of {type(self.module).__name__} made {found} joins of the kind of its scaled skip "
                    f"({entry}), so that it is not known which one is meant. Find the skips with inputs of the kind "
                    "that it is called with now, or join the skip in a module that is given it as an argument."
                )


class Interceptor:
    """A forward pre-hook and forward hook in one object: makes `change` to the tensor at an entry of the module."""

    def __init__(self, entry: Inline, change: Callable[[Tensor], Tensor]) -> None:
        self.entry, self.change = entry, change

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        """Called by torch before the forward, and after it with the output, even if there was an exception."""
        if output:
            stop_watching(module)
        else:
            start_watching(module, self.entry, self.change)


def register(module: nn.Module, hook: Any) -> tuple[Any, Any]:
    """Attach an object that starts watching before the forward and stops after it; returns the handles."""
    before = module.register_forward_pre_hook(hook, with_kwargs=True)
    return before, module.register_forward_hook(hook, with_kwargs=True, always_call=True)


def start_watching(module: nn.Module, entry: Inline, change: Callable[[Tensor], Tensor]) -> None:
    """Ask for the tensor at the entry during the module's call, from one of its forward pre-hooks."""
    if under_compile():
        raise ValueError(
            f"the forward of {type(module).__name__} joins a scaled skip itself ({entry}), which torch.compile cannot "
            "follow. Compile the modules that it calls, one by one, or join the skip in a module that is given it."
        )
    frame, mode = calling_frame(), current_mode()
    while mode is not None and not is_running(mode.frame):  # left behind by an interrupt
        mode.__exit__(None, None, None)
        mode = current_mode()
    if mode is None or mode.frame is not frame:
        mode = JoinMode(module, frame)
        mode.__enter__()
    mode.wanted.append((entry, change))


def stop_watching(module: nn.Module) -> None:
    """End what `start_watching` began for this call, once for all that asked."""
    mode = current_mode()
    if mode is None or mode.module is not module:
        return
    returned = mode.frame is calling_frame()
    if returned or not is_running(mode.frame):
        mode.__exit__(None, None, None)
    if returned:
        mode.check()


def current_mode() -> JoinMode | None:
    mode = _get_current_function_mode()
    return mode if isinstance(mode, JoinMode) else None


def under_compile() -> bool:
    """Whether the call is compiled, or is part of one that is and fell back to Python here."""
    if torch.compiler.is_compiling():
        return True
    dynamo: Any = torch._C._dynamo  # type: ignore[attr-defined]
    callback = getattr(dynamo.eval_frame, "get_eval_frame_callback", lambda: None)()
    return callable(callback)


MODULE_CALL = nn.Module._wrapped_call_impl.__code__


def calling_frame() -> FrameType:
    """The frame of torch's that calls the hooks of a module, and its forward."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") != "torch.nn.modules.module":
        assert frame.f_back is not None, "a hook is called by its module"
        frame = frame.f_back
    return frame


def is_running(frame: FrameType) -> bool:
    return any(outer is frame for outer in frames_inside(None))


def is_direct(frame: FrameType) -> bool:
    """Whether a function is called by the forward which the frame runs, not by a module that it calls."""
    inside = list(frames_inside(frame))
    return inside[-1].f_back is frame and all(inner.f_code is not MODULE_CALL for inner in inside)


def is_checkpointed(frame: FrameType) -> bool:
    return any(inner.f_globals.get("__name__") == "torch.utils.checkpoint" for inner in frames_inside(frame))


def frames_inside(frame: FrameType | None) -> Any:
    """The frames from the current one outwards, up to the given one (exclusive), or all."""
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        yield inner
        inner = inner.f_back
