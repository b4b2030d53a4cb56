"""Data whose exact score is known in closed form, and what a perfect network predicts for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.diffusion import DiffusionProcess, build_schedule
from scalelong.diffusion.guidance import Predictor

MEAN, STD = 0.3, 0.2


def build(kind: tuple[str, str] = ("linear", "discrete"), prediction="epsilon", num_steps: int = 1000):
    schedule = build_schedule(kind[0], time=kind[1], num_steps=num_steps)  # type: ignore[arg-type]
    return DiffusionProcess(schedule, prediction)


def signal_at(process: DiffusionProcess, fed: Tensor) -> tuple[Tensor, Tensor]:
    """The time that the network was fed, and log ᾱ there. Shape: (B,) → (B,), (B,)."""
    t = fed / (process.schedule.num_steps - 1) if process.schedule.is_continuous else fed
    return t, process.schedule.log_alpha_bar(t)


def gaussian_predictor(process: DiffusionProcess, std: float = STD) -> Predictor:
    """What a perfect network predicts when every pixel of the data is N(MEAN, std²)."""

    def predict(x: Tensor, fed: Tensor) -> Tensor:
        t, log_signal = signal_at(process, fed)
        log_signal = log_signal.reshape(-1, 1, 1, 1)
        alpha, variance = torch.exp(log_signal / 2), -torch.expm1(log_signal)
        surprise = (x - alpha * MEAN) / (alpha**2 * std**2 + variance)
        return process.target(MEAN + alpha * std**2 * surprise, variance.sqrt() * surprise, t)

    return predict


def seeded_noise(seeds: range, *shape: int) -> Tensor:
    return torch.stack([torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@dataclass(frozen=True)
class Mixture:
    """A mixture of Gaussians over the channels of a pixel. Shape: weights (K,), means (K, C), covariances (K, C, C)."""

    weights: Tensor
    means: Tensor
    covariances: Tensor

    @property
    def mean(self) -> Tensor:
        return self.weights @ self.means

    @property
    def covariance(self) -> Tensor:
        centred = self.means - self.mean
        spread = self.covariances + centred[:, :, None] * centred[:, None, :]
        return torch.einsum("k,kij->ij", self.weights, spread)

    def predictor(self, process: DiffusionProcess) -> Predictor:
        """The mean of x_0 given x_t, for a process that predicts x_0. Shape of x: (B, C, H, W)."""

        def predict(x: Tensor, fed: Tensor) -> Tensor:
            # The times are the same for the whole batch.
            log_signal = signal_at(process, fed)[1][0].double()
            pixels = x.double().movedim(1, -1)
            return self.estimate(pixels, log_signal).movedim(-1, 1).float()

        return predict

    def estimate(self, x: Tensor, log_signal: Tensor) -> Tensor:
        """E[x_0 | x_t]. Shape: (…, C) → (…, C)."""
        alpha, variance = torch.exp(log_signal / 2), -torch.expm1(log_signal)
        noisy = alpha**2 * self.covariances + variance * torch.eye(x.shape[-1], dtype=x.dtype)
        precision = torch.linalg.inv(noisy)
        surprise = x.unsqueeze(-2) - alpha * self.means
        weighted = torch.einsum("kij,...kj->...ki", precision, surprise)
        exponent = -(surprise * weighted).sum(-1) / 2 - torch.logdet(noisy) / 2 + self.weights.log()
        estimates = self.means + alpha * torch.einsum("kij,...kj->...ki", self.covariances, weighted)
        return (exponent.softmax(-1).unsqueeze(-1) * estimates).sum(-2)


def covariance(deviations: tuple[float, float], correlation: float) -> list[list[float]]:
    first, second = deviations
    return [[first**2, correlation * first * second], [correlation * first * second, second**2]]


def mixture(weights: list[float], means: list[list[float]], covariances: list[list[list[float]]]) -> Mixture:
    return Mixture(*(torch.tensor(values, dtype=torch.float64) for values in (weights, means, covariances)))


GAUSSIAN = mixture([1.0], [[0.3, -0.2]], [covariance((0.4, 0.25), 0.7)])
THREE = mixture(
    [0.5, 0.3, 0.2],
    [[0.6, 0.5], [-0.6, 0.4], [0.0, -0.6]],
    [covariance((0.15, 0.1), 0.5), covariance((0.1, 0.12), 0.0), covariance((0.2, 0.1), -0.6)],
)
