"""Exponential moving average of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from .parallel import local

Model = TypeVar("Model", bound=nn.Module)


class EMA:
    """A shadow of a model's parameters, s ← s + (1 − d)·(p − s), in float32 or better; buffers are copied.

    With `warmup` the decay of update n = 0, 1, … is d = min(decay, (1 + n)/(10 + n)). Names are those of the model's
    state_dict, so tied weights and scaled skips are included. Make it once the model is whole and on its device; of
    sharded parameters (FSDP) it keeps the shards.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> ema = EMA(model, decay=0.5, warmup=False)
    >>> before = model.weight.item()
    >>> _ = model.weight.data.add_(1.0)
    >>> ema.update(model)
    >>> round(ema.state_dict()["weight"].item() - before, 6)
    0.5
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, *, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1, got {decay}")
        self.decay = decay
        self.warmup = warmup
        self.step = 0
        self._swapped = False
        sources = tensors_of(model)
        self._expected = set(sources)
        self._first_name = first_names(model)
        kept = {name: sources[name] for name in dict.fromkeys(self._first_name.values())}
        self._averages = {name: wide_copy(tensor) for name, tensor in kept.items() if is_averaged(tensor)}
        self._copies = {name: tensor.detach().clone() for name, tensor in kept.items() if name not in self._averages}

    def decay_now(self) -> float:
        """The decay of the next update."""
        return min(self.decay, (1 + self.step) / (10 + self.step)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the shadow towards the model's parameters, and copy its buffers."""
        sources = self._sources(model)
        weight = 1 - self.decay_now()
        alike = [name for name, shadow in self._averages.items() if sources[name].dtype == shadow.dtype]
        if alike:
            # Shards are averaged each for itself: the whole would take the same numbers through Python's slow dispatch.
            shadows, parameters = ([local(tensors[name]) for name in alike] for tensors in (self._averages, sources))
            torch._foreach_lerp_(shadows, parameters, weight)  # pyright: ignore[reportPrivateImportUsage]
        for name in self._averages.keys() - set(alike):
            # lerp does not mix precisions; one at a time, so that only one parameter is ever copied.
            shadow = self._averages[name]
            shadow.lerp_(sources[name].to(shadow.dtype), weight)
        if self._copies:
            copies, buffers = list(self._copies.values()), [sources[name] for name in self._copies]
            torch._foreach_copy_(copies, buffers)  # pyright: ignore[reportPrivateImportUsage]
        self.step += 1

    @contextmanager
    def swap(self, model: Model) -> Iterator[Model]:
        """The model with EMA weights inside a `with`; its own come back afterwards, to the bit.

        Values are exchanged in place, so that optimisers and compiled code keep their tensors and no second copy of the
        weights is made, except of those in half precision.
        """
        own = self._exchange(model, {})
        self._swapped = True
        try:
            yield model
        finally:
            self._swapped = False
            self._exchange(model, own)

    def state_dict(self) -> dict[str, Tensor]:
        """The shadow itself, not a copy, under the names of the model's state_dict."""
        self._refuse_while_swapped()
        shadow = {**self._averages, **self._copies}
        return {name: shadow[first] for name, first in self._first_name.items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """Take over a saved shadow; `step` is the number of updates it had seen, which the warm-up needs."""
        own = self.state_dict()
        refuse_other_names(own, tensors, "the saved average")
        for name, shadow in own.items():
            shadow.copy_(tensors[name])
        self.step = step

    @torch.no_grad()
    def _exchange(self, model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Swap values with the model; weights that would not fit back into the shadow are returned, or taken, apart."""
        sources = self._sources(model)
        apart = {}
        for name, shadow in self._averages.items():
            parameter, before = sources[name], sources[name].clone()
            parameter.copy_(own.get(name, shadow))
            if parameter.dtype == shadow.dtype:
                shadow.copy_(before)
            else:
                apart[name] = before
        return apart

    def _sources(self, model: nn.Module) -> dict[str, Tensor]:
        self._refuse_while_swapped()
        sources = tensors_of(model)
        if sources.keys() != self._expected:
            refuse_other_names(self._first_name, model.state_dict(), f"this {type(model).__name__}")
        return sources

    def _refuse_while_swapped(self) -> None:
        if self._swapped:
            raise RuntimeError("the EMA weights are swapped into the model; leave the `with ema.swap(…)` first")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each tensor once, under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    # One walk instead of those of named_parameters and named_buffers: this runs at every step.
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), (prefix + name, tensor))
    return dict(found.values())


def first_names(model: nn.Module) -> dict[str, str]:
    """For every tensor of the state_dict, the first name of the same tensor: tied weights share one."""
    first: dict[int, str] = {}
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    return {name: first.setdefault(id(value), name) for name, value in state.items()}


def is_averaged(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex())


def wide_copy(parameter: Tensor) -> Tensor:
    """A copy in float32 or better: a step of 1e-4 of the distance is lost in the 8 bits of a bfloat16."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)


def refuse_other_names(expected: Mapping[str, object], found: Mapping[str, object], where: str) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise ValueError(
            f"{where} does not fit the average: missing {missing[:3] or 'nothing'}, extra {extra[:3] or 'nothing'}. "
            "Make the EMA after the model has all its parameters, scaled skips included."
        )
