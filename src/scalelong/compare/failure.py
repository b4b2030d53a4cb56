"""When a run has failed: the one definition of every command.

A run fails if its loss is not finite, if the guard gives it up, or if it ends without having learned. What it must have
learned is fixed before the first run: a share of the way from the loss of predicting nothing to that of a denoiser with
one number for each time. No verdict depends on what other runs did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..data.batches import make_batch
from ..training.loss import Validation

Cause = Literal["not finite", "given up", "did not learn"]

CLEARLY = 0.1
"""The share of what it must gain below which a run shows no sign of learning."""


@dataclass(frozen=True)
class Reference:
    """Two losses that need no training: `nothing` of the best prediction that does not see the noisy image, `simple` of
    the best that is linear in it with one number for each time.

    >>> Reference(1.0, 0.2).limit(0.5)
    0.6
    """

    nothing: float
    simple: float = 0.0

    def limit(self, must_gain: float) -> float:
        """The loss that a run must come down to: so much of the way from `nothing` to `simple`."""
        return self.nothing - must_gain * (self.nothing - self.simple)


def cause_of_failure(loss: float, limit: float, *, given_up: bool = False) -> Cause | None:
    """Why a run that has ended with this loss has failed; None if it has not.

    >>> cause_of_failure(0.14, 0.6), cause_of_failure(0.99, 0.6), cause_of_failure(float("nan"), 0.6)
    (None, 'did not learn', 'not finite')
    """
    if given_up:
        return "given up"
    if not math.isfinite(loss):
        return "not finite"
    return "did not learn" if loss > limit else None


def has_clearly_failed(losses: Sequence[float], reference: Reference, must_gain: float, planned: int) -> bool:
    """Whether a run may be stopped, by its losses so far, evenly spaced, of as many as are `planned`.

    Either the last is not finite, or half of the run is over, and in the last quarter it was never a tenth of the way
    to what it must come down to.

    >>> has_clearly_failed([1.0, 0.3, 1.0, 1.0], Reference(1.0), 0.5, planned=8)
    True
    >>> has_clearly_failed([1.0, 0.9, 0.9, 0.9], Reference(1.0), 0.5, planned=8)
    False
    """
    if losses and not math.isfinite(losses[-1]):
        return True
    window = losses[-max(1, planned // 4) :]
    return 2 * len(losses) >= planned and all(loss > reference.limit(CLEARLY * must_gain) for loss in window)


@torch.no_grad()
def reference_of(validation: Validation) -> Reference:
    """Both losses on the validation images, with the very times and noise that runs are validated with.

    Without the noisy image, the best guess of the clean one is the mean image, and that of the noise is 0: predicting
    0 throughout is never better. With it, and pixels as if independent and normal with one variance s²,
    E[x_0 | x_t] = m + a·s²·(x_t − a·m)/(a²s² + σ²) and E[ε | x_t] = σ·(x_t − a·m)/(a²s² + σ²).
    """
    batches = torch.arange(len(validation)).split(validation.batch_size)
    images = [pick_images(validation, rows) for rows in batches]
    mean = torch.stack([part.double().sum(0) for part in images]).sum(0) / len(validation)
    spread = sum(((part - mean) ** 2).mean((1, 2, 3)).sum().item() for part in images) / len(validation)
    totals = torch.zeros(2, dtype=torch.float64)
    for rows, part in zip(batches, images, strict=True):
        totals += losses_of(validation, rows, part, mean.float(), spread)
    nothing, simple = (totals / len(validation)).tolist()
    return Reference(nothing, simple)


def losses_of(validation: Validation, rows: Tensor, images: Tensor, mean: Tensor, spread: float) -> Tensor:
    """The sums of both losses over some images. Shape: (B,), (B, C, H, W), (C, H, W) → (2,), float64."""
    process, times, noise = validation.process, validation.times[rows], validation.noise[rows]
    mean, nothing = mean.expand_as(images), torch.zeros_like(images)
    signal = process.add_noise(torch.ones_like(images), nothing, times)
    sigma = process.add_noise(nothing, torch.ones_like(images), times)
    seen = process.add_noise(images, noise, times) - signal * mean
    part = seen / (signal**2 * spread + sigma**2)
    guesses = (mean, nothing), (mean + signal * spread * part, sigma * part)
    predictions = (process.target(*guess, times) for guess in guesses)
    scored = (process.loss(prediction, images, noise, times) for prediction in predictions)
    return torch.stack([loss.per_sample.double().sum() for loss in scored])


def pick_images(validation: Validation, rows: Tensor) -> Tensor:
    """Some validation images on the CPU. Shape: (B,) → (B, C, H, W)."""
    picked = validation.data.pick(rows, validation.seeds[rows])
    return make_batch(0, picked, flips=None, device=torch.device("cpu")).images.float()
