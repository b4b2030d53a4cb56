"""How much of a constant scale survives the normalisation that reads the skip.

GroupNorm(κ·s) = GroupNorm(s) for groups that lie inside the skip, so a constant acts only through groups that straddle
the boundary with the trunk, through the norm's eps, and through the shortcut beside the norm.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .site import Channels, SkipSite, is_norm

MOSTLY = 0.5


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
    if coefficient == 1:
        return 1.0
    return normalised_share(norms[0], site.joined, coefficient)


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


def warn_if_absorbed(model: nn.Module, sites: Sequence[SkipSite], constants: Tensor | None) -> None:
    """Warn once, with the measured share, if most of a constant scaling never arrives."""
    if constants is None or constants.is_meta:
        return
    scaled = [(site, constants[site.index - 1].item()) for site in sites if site.absorbed]
    shares = [surviving_share(model, site, coefficient) for site, coefficient in scaled if coefficient != 1]
    typical = mostly_absorbed(shares)
    if typical is not None:
        warnings.warn(
            f"{len(shares)} of {len(sites)} skips of {type(model).__name__} enter a normalisation that cancels a "
            f"constant: {typical:.1%} of the scaling survives it (median, on unit-variance features), the rest acts "
            'only through the shortcut beside the norm. Use where="after-norm", or method "ls"; see docs/models.md.',
            AbsorbedScalingWarning,
            stacklevel=3,
        )


def mostly_absorbed(shares: Sequence[float]) -> float | None:
    """The median of the surviving shares of the skips that enter a norm, if most of the scaling is lost; else None.

    >>> mostly_absorbed([0.01, 0.02, 0.9]), mostly_absorbed([0.6]), mostly_absorbed([])
    (0.02, None, None)
    """
    # The median: a few coefficients so small that only the norm's eps lets them through should not hide the rest.
    typical = statistics.median(shares) if shares else 1.0
    return typical if typical < MOSTLY else None
