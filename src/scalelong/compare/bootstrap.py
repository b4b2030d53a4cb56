"""A bootstrap interval of a mean that covers as often as it says, even with three values."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

DRAWS = 2000
"""Each is used twice: as it is, and mirrored."""
BLOCK = 64
"""Rows that are drawn for at a time, for the sake of memory."""


def bootstrap_interval(values: Tensor, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
    """Low and high end for the mean, by a smoothed bootstrap of Student's t. Shape: (..., n) → (...), (...); n ≥ 2.

    The usual percentile interval misses far too often: of 95 %, 75 are left with three values and 84 with five. Two
    things mend it. What is drawn is the error of a mean in standard errors of its own draw, so that not knowing the
    spread counts too. And each drawn value gets Gaussian noise, or else three values would often be thrice the same;
    with more values there is less noise, and more of their own skewness.

    The draws are always the same, the order of values does not matter, and the interval of −x is that of x mirrored.

    >>> [round(end.item(), 1) for end in bootstrap_interval(torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]))]
    [0.6, 8.6]
    """
    count, x = values.shape[-1], values.double().sort(dim=-1).values
    mean, spread = x.mean(-1), x.std(-1)
    standard = (x - mean[..., None]) / spread.where(spread > 0, 1)[..., None]
    tails = torch.cat([tails_of(rows, confidence) for rows in standard.reshape(-1, count).split(BLOCK)])
    low, high = (mean[..., None] - tails.view(*mean.shape, 2) * (spread / math.sqrt(count))[..., None]).unbind(-1)
    return low, high


def tails_of(rows: Tensor, confidence: float) -> Tensor:
    """The upper and the lower end of the drawn values of t. Shape: (R, n), sorted → (R, 2)."""
    index, noise = draws(rows.shape[-1])
    drawn = rows[:, index] + noise
    t = drawn.mean(-1) / drawn.std(-1) * math.sqrt(rows.shape[-1])
    outside = max(1, round((1 - confidence) / 2 * t.shape[-1]))
    ordered = t.sort(dim=-1).values
    return torch.stack([ordered[:, -outside], ordered[:, outside - 1]], dim=-1)


@lru_cache(maxsize=16)
def draws(count: int) -> tuple[Tensor, Tensor]:
    """Which of the sorted values are drawn, and the noise that each gets. Shape: (2 · DRAWS, n) both.

    The second half mirrors the first: what is true of x then is true of −x to the last draw.
    """
    generator = torch.Generator().manual_seed(count)
    index = torch.randint(count, (DRAWS, count), generator=generator)
    noise = torch.randn(DRAWS, count, generator=generator, dtype=torch.float64)
    width = 1.06 * count**-0.2  # of a kernel estimate of a normal density (Silverman's rule), in standard deviations
    return torch.cat([index, count - 1 - index]), width * torch.cat([noise, -noise])
