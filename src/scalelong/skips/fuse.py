"""Fold constant coefficients into the weights that read the skip, and take them out again.

A Linear or convolution reads κ·s with weight W exactly as it reads s with weight κ·W. After a norm the coefficient
multiplies the norm's own scale and shift in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .site import LINEAR, Channels, SkipSite, is_norm, runs_as

AFFINE = (nn.GroupNorm, nn.LayerNorm)
# Subclasses of these (ADM's and diffusers') that only cast to float32 and back.
CASTING = ("GroupNorm32", "FP32LayerNorm")


@dataclass(frozen=True)
class Slice:
    """The part of one weight that multiplies a skip: `channels` along `dim` of the parameter at `path`.

    A path rather than the parameter, which loading with assign=True or sharding would replace.
    """

    path: str
    channels: Channels
    dim: int

    def of(self, model: nn.Module) -> Tensor:
        return model.get_parameter(self.path).data.narrow(self.dim, self.channels.start, len(self.channels))


class Preserved:
    """Weights that `preserve=True` divided by a coefficient, with their values before, so that undo is bit-exact."""

    def __init__(self, model: nn.Module, part: Slice, coefficient: float, index: int) -> None:
        self.part, self.coefficient, self.index = part, coefficient, index
        self.before = part.of(model).clone()
        if not self.divided(self.before).isfinite().all():
            raise ValueError(f"preserve=True would overflow {part.path} when dividing it by {coefficient:.3g}")

    def divided(self, values: Tensor) -> Tensor:
        return values / self.coefficient

    def divide(self, model: nn.Module) -> None:
        self.part.of(model).copy_(self.divided(self.before))

    def restore(self, model: nn.Module, coefficient: float) -> None:
        """Undo the division; weights that were trained since keep the function that `coefficient` gives them."""
        values = self.part.of(model)
        before = self.before.to(values)
        untrained = coefficient == self.coefficient and torch.equal(values, self.divided(before))
        values.copy_(before if untrained else values * coefficient)


def foldable_slices(model: nn.Module, site: SkipSite, where: str) -> list[Slice]:
    """Every weight slice that a coefficient of this site can be folded into; raises, with the reason, if it cannot."""
    if site.joined is None and site.readers:
        raise cannot_fold(site, "its site does not say where in its readers' input it lies; give it joined=")
    if site.joined is None:
        raise cannot_fold(
            site, "it is added to the trunk, or changed before it is concatenated, so no weight reads it alone"
        )
    if not site.readers:
        raise cannot_fold(site, "something other than a Linear or convolution reads it, or its readers are unknown")
    return [part for reader in site.readers for part in reader_slices(model, site, site.joined, reader, where)]


def reader_slices(model: nn.Module, site: SkipSite, joined: Channels, reader: str, where: str) -> list[Slice]:
    module: Any = model.get_submodule(reader)
    kind = type(module).__name__
    if is_norm(module):
        if where == "input":
            raise cannot_fold(site, f"a norm comes first ({reader}, {kind}), which no weight can imitate")
        affine = runs_as(module, AFFINE) or (isinstance(module, AFFINE) and kind in CASTING)
        if not affine or module.weight is None:
            raise cannot_fold(site, f"{reader} ({kind}) has no scale of its own to fold into")
        return [Slice(f"{reader}.{name}", joined, 0) for name, _ in module.named_parameters(recurse=False)]
    if not runs_as(module, LINEAR) or module._parameters.get("weight") is None:
        raise cannot_fold(site, f"{reader} ({kind}) is not a plain Linear or convolution (merge adapters first)")
    if isinstance(module, _ConvNd) and module.groups != 1:
        raise cannot_fold(site, f"{reader} ({kind}) is a grouped convolution")
    return [Slice(f"{reader}.weight", joined, 0 if isinstance(module, _ConvTransposeNd) else 1)]


def cannot_fold(site: SkipSite, reason: str) -> ValueError:
    return ValueError(
        f"skip {site.index} at {site.consumer!r} cannot be folded into weights: {reason}. "
        "Keep the scaled model as it is, and call scale_skips again after loading its weights elsewhere."
    )
