"""How large the network's input is, and its target beside it, on given data and schedule (Lemma 3.2, Section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ..diffusion import DiffusionProcess, Prediction, Schedule
from .laws import input_norm

BATCH = 512


@dataclass(frozen=True)
class InputNorms:
    """‖x_t‖² and ‖target‖² per dimension of noised images. Shape: (count,) each, float64.

    `second_moment` is E‖x_0‖²/m, `mean_alpha_bar` is E_t ᾱ_t over the schedule's own times.
    """

    times: Tensor
    inputs: Tensor
    targets: Tensor
    second_moment: float
    mean_alpha_bar: float
    prediction: Prediction

    @property
    def ratios(self) -> Tensor:
        """‖target‖²/‖x_t‖² of every image; the target is ε where the network predicts it."""
        return self.targets / self.inputs

    @property
    def mean_of_ratios(self) -> float:
        return self.ratios.mean().item()

    @property
    def ratio_of_means(self) -> float:
        return (self.targets.mean() / self.inputs.mean()).item()

    @property
    def lemma(self) -> float:
        """The ratio of means that Lemma 3.2 gives, for x_0 ~ U[−1, 1]^m."""
        alpha = self.mean_alpha_bar
        targets = {"epsilon": 1.0, "x0": 1 / 3, "v": alpha + (1 - alpha) / 3}
        return targets[self.prediction] / input_norm(alpha, 1)

    def share_below(self, limit: float) -> float:
        return (self.ratios < limit).double().mean().item()

    def quantile(self, share: float) -> float:
        return self.ratios.quantile(share).item()


def measure_inputs(
    images: Tensor, schedule: Schedule, *, prediction: Prediction = "epsilon", generator: Generator
) -> InputNorms:
    """Noise every image once, the times spread evenly. Shape: images (N, …) in [−1, 1], or latents; on any device."""
    if not images.is_floating_point() or images.ndim < 2 or not len(images):
        raise ValueError(
            f"needs images as floats of shape (count, …), in [-1, 1], got {tuple(images.shape)} of {images.dtype}"
        )
    # Where the schedule, the noise and float64 are.
    images, process = images.cpu(), DiffusionProcess(schedule, prediction)
    times = process.stratified_times(len(images), generator)
    parts = zip(images.split(BATCH), times.split(BATCH), strict=True)
    norms = [noised_norms(*part, process, generator) for part in parts]
    inputs, targets = (torch.cat(column) for column in zip(*norms, strict=True))
    second_moment = images.double().square().mean().item()
    return InputNorms(times, inputs, targets, second_moment, mean_alpha_bar(schedule), prediction)


def noised_norms(x0: Tensor, t: Tensor, process: DiffusionProcess, generator: Generator) -> tuple[Tensor, Tensor]:
    """Mean squares of x_t and of the target. Shape: (B, …), (B,) → (B,), (B,)."""
    noise = torch.randn(x0.shape, generator=generator)
    noisy, target = process.add_noise(x0, noise, t), process.target(x0, noise, t)
    inputs, targets = (part.double().flatten(1).square().mean(1) for part in (noisy, target))
    return inputs, targets


def mean_alpha_bar(schedule: Schedule) -> float:
    """E_t ᾱ_t over the schedule's times.

    >>> from scalelong.diffusion import LinearSchedule
    >>> round(mean_alpha_bar(LinearSchedule()), 4)
    0.2755
    """
    return schedule.alphas_cumprod.double().mean().item()
