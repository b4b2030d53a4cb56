"""One model family: how to build it small, what to feed it, and what its long skips are known to be."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .oracle import Join, Joined, record_joins, run_scaled

Inputs = dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class Family:
    """A tiny model with its inputs and, declared by hand, its long skips."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    widths: tuple[int, ...] = ()
    """Size of dimension 1 of every long skip, outermost first."""
    join: Join = Join()
    """Where they are joined."""
    absorbed: bool = False
    """Whether a norm is the first to read the joined features."""
    fuses: bool = True
    """Whether a constant folds into weights: as it is, or, if absorbed, after the norm."""
    requires: str | None = None
    """The library that must be installed."""
    like: str | None = None
    """Another family that hands over its skips by the same code; its laws then need not be run as often."""

    def __str__(self) -> str:
        return self.name

    @property
    def num_skips(self) -> int:
        return len(self.widths)

    def tiny(self) -> tuple[nn.Module, Inputs]:
        """The model, in eval mode and with no parameter left constant, and inputs; the same at every call."""
        if self.requires is not None:
            pytest.importorskip(self.requires)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            model = self.build().eval()
            wake(model)
            return model, self.inputs()

    @torch.no_grad()
    def run(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """The model's output as a tensor."""
        return self.run_with_gradients(model, inputs)

    def run_with_gradients(self, model: nn.Module, inputs: Inputs) -> Tensor:
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        if isinstance(output, Tensor):
            return output
        return output[0] if isinstance(output, tuple) else output.sample

    def is_long_join(self, joined: Joined) -> bool:
        return self.join.describes(joined)

    def joins(self, model: nn.Module, inputs: Inputs) -> list[Joined]:
        """The long skips of a real forward pass, innermost first."""
        return record_joins(model, inputs, self.run, self.join)

    def run_scaled(self, model: nn.Module, inputs: Inputs, coefficients: list[float]) -> Tensor:
        """The output with the i-th skip multiplied by `coefficients[i - 1]` where it is joined."""
        return run_scaled(model, inputs, self.run, self.join, coefficients)


@torch.no_grad()
def wake(model: nn.Module) -> None:
    """Disturb every parameter that starts as a constant.

    Zero-initialised layers would hide a skip from the output, and norms without a gain would hide a mistake.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.min() == parameter.max():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


def cases(families: list[Family]) -> list[Any]:
    """Parameters of a test of every family; those that are like another one are left to the slow tests."""
    return [family if family.like is None else pytest.param(family, marks=pytest.mark.slow) for family in families]
