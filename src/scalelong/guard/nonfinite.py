"""Where a number that is not finite began: the forward pass is run again, watched module by module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..utils.runtime import tensors_in

Kind = Literal["parameter", "buffer", "input", "output", "loss", "gradient"]

SENTENCES: dict[Kind, str] = {
    "parameter": "the parameter {name} was already non-finite",
    "buffer": "the buffer {name} was already non-finite",
    "input": "the input of {name} was already non-finite",
    "output": "{name} is the first module whose output was non-finite",
    "loss": "every module's output was finite, but not what was computed from the last",
    "gradient": "the forward pass was finite; going back from the loss, {name} is the first with a non-finite gradient",
}


@dataclass(frozen=True)
class Origin:
    """Where a non-finite number came from; `name` is a parameter, a buffer or a module of the model.

    >>> str(Origin("output", "mid_block.attn"))
    'mid_block.attn is the first module whose output was non-finite'
    """

    kind: Kind
    name: str

    def __str__(self) -> str:
        return SENTENCES[self.kind].format(name=self.name)


def find_first_nonfinite(model: nn.Module, *forwards: Callable[[], Any]) -> Origin | None:
    """Run the forward passes of a step again, watched module by module; None if everything was finite this time.

    Each calls the model on a part of the failed step's batch and returns its loss, one after the other, so that the
    activations of one part are held at a time; with a loss, gradients are computed anew, as clipping by a non-finite
    norm has overwritten those at hand. Random states stay as they were.
    """
    bad = first_nonfinite(model.named_parameters())
    if bad is not None:
        return Origin("parameter", bad)
    hooks = NonFiniteHooks(model)
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):  # Random numbers of dropout, say, are not missing afterwards.
        for run_forward in forwards:
            origin = hooks.origin_in(run_forward)
            if origin is not None:
                return origin
    bad = first_nonfinite((name, parameter.grad) for name, parameter in hooks.parameters())
    return None if bad is None else Origin("gradient", bad)


class NonFiniteHooks:
    """Hooks on every module that find the first non-finite value, and the order in which modules are entered."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.origin: Origin | None = None
        self.entered: dict[nn.Module, None] = {}
        self.running: list[nn.Module] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for module in self.names:
                hooks.enter_context(module.register_forward_pre_hook(self._before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._after, always_call=True))
            yield

    def origin_in(self, run_forward: Callable[[], Any]) -> Origin | None:
        """Where a non-finite number began in one forward pass, or going back from its loss."""
        with self.attached(), without_compilation(), torch.enable_grad():
            result = run_forward()
        if self.origin is not None:
            return self.origin
        if not all_finite(result):
            return Origin("loss", "loss")
        bad = first_bad_gradient(self.parameters(), result)
        return None if bad is None else Origin("gradient", bad)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that took part, nearest to the loss first: gradients flow against the order of the forward."""
        entered = [(self.names[module], module) for module in reversed(self.entered)]
        return [(join(name, own), p) for name, module in entered for own, p in module.named_parameters(recurse=False)]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.entered.setdefault(module)
        if self.origin is None and not all_finite((args, kwargs)):
            # Finite until here, so what runs around this module made it, between its other modules.
            self.origin = self._blame(self.running[-1]) if self.running else Origin("input", self._title(module))
        self.running.append(module)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        if self.origin is None and not all_finite(output):
            self.origin = self._blame(module)

    def _blame(self, module: nn.Module) -> Origin:
        buffer = first_nonfinite(module.named_buffers(recurse=False))
        if buffer is None:
            return Origin("output", self._title(module))
        return Origin("buffer", join(self.names[module], buffer))

    def _title(self, module: nn.Module) -> str:
        return self.names[module] or type(module).__name__.removeprefix("FSDP")  # As fully_shard renames it.


def first_bad_gradient(parameters: list[tuple[str, nn.Parameter]], result: Any) -> str | None:
    """The first parameter whose gradient of `result` is non-finite, if that is a loss."""
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not trained or not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
        return None
    fresh = torch.autograd.grad(result, [parameter for _, parameter in trained], allow_unused=True)
    return first_nonfinite((name, gradient) for (name, _), gradient in zip(trained, fresh, strict=True))


def first_nonfinite(tensors: Any) -> str | None:
    return next((name for name, tensor in tensors if not all_finite(tensor)), None)


def all_finite(value: Any) -> bool:
    """Whether no tensor in a nest of tuples, lists and dicts holds an infinity or a NaN."""
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors_in(value))


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def without_compilation() -> AbstractContextManager[None]:
    """Compiled code was traced without our hooks and would not call them."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    # Nothing is compiled if dynamo was never imported, which takes seconds.
    return set_stance("force_eager") if set_stance and "torch._dynamo" in sys.modules else nullcontext()
