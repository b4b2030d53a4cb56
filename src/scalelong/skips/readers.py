"""What becomes of a constant coefficient in the modules that read the skip: a norm absorbs it, a weight takes it over.

GroupNorm(κ·s) = GroupNorm(s) for groups that lie inside the skip, so a constant acts only through groups that straddle
the boundary with the trunk, through the norm's eps, and through the shortcut beside the norm. A Linear or convolution
reads κ·s with weight W exactly as it reads s with weight κ·W; so does a norm's own scale and shift after the norm.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .methods import SkipScaling
from .site import LINEAR, Channels, SkipSite, is_norm, runs_as

MOSTLY = 0.5
AFFINE = (nn.GroupNorm, nn.LayerNorm)
# Subclasses of these (ADM's and diffusers') that only cast to float32 and back.
CASTING = ("GroupNorm32", "FP32LayerNorm")


class AbsorbedScalingWarning(UserWarning):
    """A constant scale is mostly cancelled by the normalisation that reads the skip."""


def surviving_share(model: nn.Module, site: SkipSite, coefficient: float) -> float:
    """The share of the scaling that the norm lets through, measured on random features of unit variance.

    It is the change that the coefficient makes in the norm's output, over the change it would make if it were applied
    after the norm: 1 if nothing is absorbed, 0 if all of it is.
    """
    norms = [module for module in map(model.get_submodule, site.readers) if is_norm(module)]
    if not norms or site.joined is None:
        return 0.0 if site.absorbed else 1.0
    return 1.0 if coefficient == 1 else normalised_share(norms[0], site.joined, coefficient)


def surviving_shares(model: nn.Module, sites: Sequence[SkipSite], constants: Sequence[float]) -> list[float]:
    """The share of every skip that enters a norm and is scaled; `constants` are those of all skips, outermost first."""
    absorbed = [(site, constants[site.index - 1]) for site in sites if site.absorbed]
    return [surviving_share(model, site, constant) for site, constant in absorbed if constant != 1]


def normalised_share(norm: nn.Module, joined: Channels, coefficient: float) -> float:
    width = norm_width(norm, joined)
    features = torch.randn(2, width, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor = torch.ones(width, 1, dtype=torch.float64)
    factor[joined.start : joined.stop] = coefficient
    plain = normalise(norm, features)
    moved = normalise(norm, features * factor) - plain
    wanted = plain * factor - plain
    return (moved.norm() / wanted.norm()).item()


def norm_width(norm: Any, joined: Channels) -> int:
    """How many channels the norm reads: up to the skip's last one unless it knows of more."""
    shape = getattr(norm, "normalized_shape", None)
    return max(getattr(norm, "num_channels", 0), shape[-1] if shape else 0, joined.stop)


def normalise(norm: Any, features: Tensor) -> Tensor:
    """What the norm does to (B, C, positions), without its learned scale and shift."""
    eps = next((part.eps for part in norm.modules() if getattr(part, "eps", None)), 1e-5)
    groups = next((int(part.num_groups) for part in norm.modules() if hasattr(part, "num_groups")), None)
    if groups is not None:
        return F.group_norm(features, groups, eps=eps)
    if "batch" in type(norm).__name__.lower() or "instance" in type(norm).__name__.lower():
        return F.batch_norm(features, None, None, training=True, eps=eps)
    by_position = features.transpose(1, 2)
    return F.layer_norm(by_position, by_position.shape[-1:], eps=eps).transpose(1, 2)


def mostly_absorbed(shares: Sequence[float]) -> float | None:
    """The median of the surviving shares of the skips that enter a norm, if most of the scaling is lost; else None.

    >>> mostly_absorbed([0.01, 0.02, 0.9]), mostly_absorbed([0.6]), mostly_absorbed([])
    (0.02, None, None)
    """
    # The median: a few coefficients so small that only the norm's eps lets them through should not hide the rest.
    typical = statistics.median(shares or [1.0])
    return typical if typical < MOSTLY else None


def warn_if_absorbed(model: nn.Module, sites: Sequence[SkipSite], constants: Tensor | None) -> None:
    """Warn once, with the measured share, if most of a constant scaling never arrives."""
    if constants is None or constants.is_meta:
        return
    shares = surviving_shares(model, sites, constants.tolist())
    typical = mostly_absorbed(shares)
    if typical is not None:
        warnings.warn(
            f"{len(shares)} of {len(sites)} skips of {type(model).__name__} enter a normalisation that cancels a "
            f"constant: {typical:.1%} of the scaling survives it (median, on unit-variance features), the rest acts "
            'only through the shortcut beside the norm. Use where="after-norm", or method "ls"; see docs/models.md.',
            AbsorbedScalingWarning,
            stacklevel=3,
        )


@dataclass
class Slice:
    """The part of one weight that multiplies a skip, and the coefficient it can take over.

    A path rather than the parameter, which loading with assign=True or sharding would replace. With `preserve=True` it
    is divided by the coefficient, and keeps the values before, so that undo is bit-exact.
    """

    path: str
    channels: Channels
    dim: int
    """The dimension of the parameter that `channels` are counted in."""
    coefficient: float
    index: int
    """i of the skip."""
    before: Tensor = field(init=False)

    def of(self, model: nn.Module) -> Tensor:
        return model.get_parameter(self.path).data.narrow(self.dim, self.channels.start, len(self.channels))

    def keep(self, model: nn.Module) -> None:
        """Note the values before the division; raises if it cannot be undone."""
        if self.coefficient == 0:
            raise ValueError("preserve=True cannot divide weights by a coefficient of 0; start from another init=")
        self.before = self.of(model).clone()
        if not (self.before / self.coefficient).isfinite().all():
            raise ValueError(f"preserve=True would overflow {self.path} when dividing it by {self.coefficient:.3g}")

    def divide(self, model: nn.Module) -> None:
        self.of(model).copy_(self.before / self.coefficient)

    def restore(self, model: nn.Module, constants: Tensor | None) -> None:
        """Undo the division; weights that were trained since keep the function that the coefficient gives them."""
        coefficient = self.coefficient if constants is None else constants[self.index - 1].item()
        values = self.of(model)
        before = self.before.to(values)
        untrained = coefficient == self.coefficient and torch.equal(values, before / coefficient)
        values.copy_(before if untrained else values * coefficient)


def foldable_slices(model: nn.Module, sites: Sequence[SkipSite], scaling: SkipScaling, where: str) -> list[Slice]:
    """Every weight slice that a coefficient can be folded into; raises, with the reason, if one of them cannot."""
    constants = scaling.constants()
    if constants is None:
        raise cannot_fold(sites[0], f"the coefficients of {type(scaling).__name__} depend on the input")
    found, users = [], {}
    for site in sites:
        for path, dim, joined in read_weights(model, site, where):
            other = users.setdefault(id(model.get_parameter(path)), site)
            if other is not site:
                raise cannot_fold(site, f"skip {other.index} is read by the same weight, {path}")
            found.append(Slice(path, joined, dim, constants[site.index - 1].item(), site.index))
    return found


def read_weights(model: nn.Module, site: SkipSite, where: str) -> list[tuple[str, int, Channels]]:
    """The path of every weight that multiplies the skip, which of its dimensions, and the skip's place in that."""
    if site.joined is None and site.readers:
        raise cannot_fold(site, "its site does not say where in its readers' input it lies; give it joined=")
    if site.joined is None:
        reason = "it is added to the trunk, or changed before it is concatenated, so no weight reads it alone"
        raise cannot_fold(site, reason)
    if not site.readers:
        raise cannot_fold(site, "something other than a Linear or convolution reads it, or its readers are unknown")
    return [(*weight, site.joined) for reader in site.readers for weight in weights_of(model, site, reader, where)]


def weights_of(model: nn.Module, site: SkipSite, reader: str, where: str) -> list[tuple[str, int]]:
    module: Any = model.get_submodule(reader)
    kind = type(module).__name__
    if is_norm(module):
        if where == "input":
            raise cannot_fold(site, f"a norm comes first ({reader}, {kind}), which no weight can imitate")
        affine = runs_as(module, AFFINE) or (isinstance(module, AFFINE) and kind in CASTING)
        if not affine or module.weight is None:
            raise cannot_fold(site, f"{reader} ({kind}) has no scale of its own to fold into")
        return [(f"{reader}.{name}", 0) for name, _ in module.named_parameters(recurse=False)]
    if not runs_as(module, LINEAR) or module._parameters.get("weight") is None:
        raise cannot_fold(site, f"{reader} ({kind}) is not a plain Linear or convolution (merge adapters first)")
    if isinstance(module, _ConvNd) and module.groups != 1:
        raise cannot_fold(site, f"{reader} ({kind}) is a grouped convolution")
    return [(f"{reader}.weight", 0 if isinstance(module, _ConvTransposeNd) else 1)]


def cannot_fold(site: SkipSite, reason: str) -> ValueError:
    return ValueError(
        f"skip {site.index} at {site.consumer!r} cannot be folded into weights: {reason}. "
        "Keep the scaled model as it is, and call scale_skips again after loading its weights elsewhere."
    )
