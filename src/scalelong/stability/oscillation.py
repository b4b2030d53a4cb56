"""How much a series moves from one reading to the next, over a window of readings (the paper's Fig. 1)."""

from __future__ import annotations

import torch
from torch import Tensor


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


def relative(series: Tensor, variation: Tensor) -> Tensor:
    """The variation of n readings, per step and over the mean size. Shape: (n, S), (S,) → (S,)."""
    if len(series) < 2:
        return torch.full_like(variation, torch.nan)
    size = series.abs().mean(dim=0) * (len(series) - 1)
    index = torch.where(size == 0, variation, variation / size)
    return index.where(series.isfinite().all(dim=0), torch.nan)
