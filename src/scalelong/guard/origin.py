"""Where a non-finite number first appeared: in the weights, the input, a module's output, the loss or a gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

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
    with isolated_randomness(model):
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
        self.origin: Origin | None = None
        self.entered: dict[str, nn.Module] = {}
        self.running: list[str] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                hooks.enter_context(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._after(name), always_call=True))
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
        entered = [(name, module) for name, module in reversed(self.entered.items())]
        return [(join(name, own), p) for name, module in entered for own, p in module.named_parameters(recurse=False)]

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.entered.setdefault(name, module)
            if self.origin is None and not all_finite((args, kwargs)):
                # Finite until here, so what runs around this module made it, between its other modules.
                self.origin = self._blame(self.running[-1]) if self.running else Origin("input", self._title(name))
            self.running.append(name)

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()
            if self.origin is None and not all_finite(output):
                self.origin = self._blame(name)

        return hook

    def _blame(self, name: str) -> Origin:
        module = self.model.get_submodule(name)
        buffer = first_nonfinite(module.named_buffers(recurse=False))
        return Origin("output", self._title(name)) if buffer is None else Origin("buffer", join(name, buffer))

    def _title(self, name: str) -> str:
        return name or type(self.model).__name__.removeprefix("FSDP")  # As fully_shard renames it.


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
    return all(bool(tensor.isfinite().all()) for tensor in nested_tensors(value))


def nested_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, Mapping):
        yield from nested_tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from nested_tensors(item)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def isolated_randomness(model: nn.Module) -> AbstractContextManager[None]:
    """Random numbers drawn inside, by dropout say, are not missing afterwards."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    return torch.random.fork_rng(devices=list(devices))


def without_compilation() -> AbstractContextManager[None]:
    """Compiled code was traced without our hooks and would not call them."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    # Nothing is compiled if dynamo was never imported, which takes seconds.
    return set_stance("force_eager") if set_stance and "torch._dynamo" in sys.modules else nullcontext()
