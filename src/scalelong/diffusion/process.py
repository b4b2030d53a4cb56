"""The forward process: times, noised images, what the network learns from them, and the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .schedule import LinearSchedule, Schedule

Prediction = Literal["epsilon", "x0", "v"]

# Paper: t ~ U[0, 1]; here: from 1e-5, as in score SDEs, because x_0 and ε cannot be told apart at t = 0.
EARLIEST_TIME = 1e-5


class Loss(NamedTuple):
    """The loss of every image, shape (B,), and their mean."""

    per_sample: Tensor
    mean: Tensor


@dataclass(frozen=True)
class DiffusionProcess:
    """Noises images and scores predictions, x_t = sqrt(ᾱ_t)·x_0 + sqrt(1−ᾱ_t)·ε (Eq. 1).

    The network predicts ε, x_0, or v = sqrt(ᾱ)·ε − sqrt(1−ᾱ)·x_0. Results are float32 also for half-precision images
    and predictions, because ᾱ near 0 or 1 does not survive rounding; no method waits for the device.

    >>> process = DiffusionProcess(LinearSchedule(), "v")
    >>> x0, noise, t = torch.zeros(2, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.tensor([0, 999])
    >>> noisy = process.add_noise(x0, noise, t)
    >>> process.loss(process.target(x0, noise, t), x0, noise, t).mean
    tensor(0.)
    """

    schedule: Schedule = field(default_factory=LinearSchedule)
    prediction: Prediction = "epsilon"
    min_snr_gamma: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.prediction not in get_args(Prediction):
            raise ValueError(f"prediction must be one of {', '.join(get_args(Prediction))}, got {self.prediction!r}")
        if self.min_snr_gamma is not None and not self.min_snr_gamma > 0:
            raise ValueError(f"min_snr_gamma must be positive (5 is usual), or None, got {self.min_snr_gamma}")

    def sample_times(self, count: int, generator: torch.Generator, *, device: torch.device | str = "cpu") -> Tensor:
        """Uniform times: integers in [0, num_steps), or floats in [1e-5, 1]. Shape: (count,).

        They are sampled where the generator lives, so a CPU generator gives the same times for every device.
        """
        if self.schedule.is_continuous:
            times = self._from_uniform(torch.rand(count, generator=generator, device=generator.device))
        else:
            times = torch.randint(self.schedule.num_steps, (count,), generator=generator, device=generator.device)
        return times.to(device, non_blocking=True)

    def stratified_times(self, count: int, generator: torch.Generator, *, device: torch.device | str = "cpu") -> Tensor:
        """Uniform times, one in each of `count` equal parts of the range, in random order. Shape: (count,).

        They make a validation loss comparable between evaluations; any slice of them still spans the range.
        """
        order = torch.randperm(count, generator=generator, device=generator.device)
        within = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
        return self._from_uniform((order + within) / count).to(device, non_blocking=True)

    def model_time(self, t: Tensor) -> Tensor:
        """What the network is fed: t itself, or t·(num_steps−1), i.e. t·999, in continuous time. Shape: (B,)."""
        return t.float() * (self.schedule.num_steps - 1) if self.schedule.is_continuous else t

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t = sqrt(ᾱ_t)·x_0 + sqrt(1−ᾱ_t)·ε. Shape: (B, …), (B, …), (B,) → (B, …)."""
        alpha, sigma = self._coefficients(t, x0)
        return alpha * x0 + sigma * noise

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the network should predict at x_t. Shape: (B, …), (B, …), (B,) → (B, …)."""
        if self.prediction == "epsilon":
            return _precise(noise)
        if self.prediction == "x0":
            return _precise(x0)
        alpha, sigma = self._coefficients(t, x0)
        return alpha * noise - sigma * x0

    def loss_weight(self, t: Tensor) -> Tensor:
        """The weight of the squared error at t: 1, or min-SNR-γ (Hang et al. 2023). Shape: (B,) → (B,).

        With SNR = ᾱ/(1−ᾱ), all three are the loss min(SNR, γ)·‖x_0 − x̂_0‖² in terms of what is predicted:
        x0: min(SNR, γ);  epsilon: min(SNR, γ)/SNR;  v: min(SNR, γ)/(SNR + 1).
        """
        log_signal = self.schedule.log_alpha_bar(t)
        signal, noise, gamma = log_signal.exp(), -torch.expm1(log_signal), self.min_snr_gamma
        if gamma is None:
            return torch.ones_like(signal)
        if self.prediction == "epsilon":
            return (gamma * noise / signal).clamp(max=1)
        if self.prediction == "x0":
            return (signal / noise).clamp(max=gamma)
        return torch.minimum(signal, gamma * noise)

    def loss(self, prediction: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> Loss:
        """Weighted mean squared error of the network's output. Shape: three times (B, …), (B,) → (B,) and ()."""
        target = self.target(x0, noise, t)
        if prediction.shape != target.shape:
            raise ValueError(f"the network returned {tuple(prediction.shape)} for images of {tuple(target.shape)}")
        error = (_precise(prediction) - target).square()
        per_sample = error.mean(dim=tuple(range(1, error.ndim))) * self.loss_weight(t)
        return Loss(per_sample, per_sample.mean())

    def predict_x0(self, prediction: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
        """The clean image that the network's output at x_t implies. Shape: (B, …), (B, …), (B,) → (B, …)."""
        alpha, sigma = self._coefficients(t, noisy)
        if self.prediction == "epsilon":
            return (noisy - sigma * prediction) / alpha
        if self.prediction == "x0":
            return _precise(prediction)
        return alpha * noisy - sigma * prediction

    def _coefficients(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(ᾱ) and sqrt(1−ᾱ), each of shape (B, 1, …), to be multiplied with images of shape (B, …)."""
        log_signal = self.schedule.log_alpha_bar(t).reshape(-1, *[1] * (like.ndim - 1))
        return torch.exp(log_signal / 2), torch.sqrt(-torch.expm1(log_signal))

    def _from_uniform(self, uniform: Tensor) -> Tensor:
        """Times of numbers in [0, 1]; rounding may have brought the last of them to 1. Shape: (B,) → (B,)."""
        if self.schedule.is_continuous:
            return (EARLIEST_TIME + (1 - EARLIEST_TIME) * uniform).float()
        return (uniform * self.schedule.num_steps).long().clamp(max=self.schedule.num_steps - 1)


def _precise(images: Tensor) -> Tensor:
    """The same values in float32 at least."""
    return images.to(torch.promote_types(images.dtype, torch.float32))
