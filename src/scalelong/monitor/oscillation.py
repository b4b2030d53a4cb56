"""How much a series moves from one reading to the next, over a window of readings (the paper's Fig. 1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

OF_NOISE = 2 / math.sqrt(math.pi)
"""The mean of |a − b| for two normal numbers of standard deviation 1."""


def oscillation_index(series: Tensor) -> Tensor:
    """Relative total variation per reading: the mean of |x_{k+1} − x_k| over the mean of |x_k|. Shape: (n, S) → (S,).

    0 for a constant, and 1 for a series that jumps between 1 and 3. A series of zeros has 0, one with a value that is
    missing or not finite has NaN.

    >>> oscillation_index(torch.tensor([[1.0, 1.0], [3.0, 2.0], [1.0, 3.0], [3.0, 4.0]])).tolist()
    [1.0, 0.4...]
    """
    return relative(series, series.diff(dim=0).abs().sum(dim=0))


def swing_index(series: Tensor) -> Tensor:
    """The part of the oscillation index that comes back: without the net change, so that growth counts nothing.

    >>> swing_index(torch.tensor([[1.0, 1.0], [3.0, 2.0], [1.0, 3.0], [3.0, 4.0]])).tolist()
    [0.66..., 0.0]
    """
    net = (series[-1] - series[0]).abs()
    return relative(series, series.diff(dim=0).abs().sum(dim=0) - net)


def beyond_noise(swings: Tensor, noise: Tensor) -> Tensor:
    """The part of the swings that the draw of the batches does not explain; `noise` is a relative standard error.

    Independent motions add in squares. Noise that is not known counts as none. Shape: (S,), (S,) → (S,).

    >>> beyond_noise(torch.tensor([0.3, 0.1]), torch.tensor([0.1, 0.1])).tolist()
    [0.27..., 0.0]
    """
    explained = OF_NOISE * noise.nan_to_num(0.0, posinf=0.0)
    return (swings.square() - explained.square()).clamp_min(0).sqrt()


def relative(series: Tensor, variation: Tensor) -> Tensor:
    """The variation of n readings, per step and over the mean size. Shape: (n, S), (S,) → (S,)."""
    if len(series) < 2:
        return torch.full_like(variation, torch.nan)
    size = series.abs().mean(dim=0) * (len(series) - 1)
    index = torch.where(size == 0, variation, variation / size)
    return index.where(series.isfinite().all(dim=0), torch.nan)
