"""The losses that a recipe's runs are judged by: computed once from its validation images, before any training."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.batches import make_batch
from ..training.loss import Validation
from .failure import Reference


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
