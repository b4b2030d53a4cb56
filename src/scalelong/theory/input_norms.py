"""How large the network's input is, and its target beside it, on given data and schedule (Lemma 3.2, Section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

from ..data import DataConfig, load_images
from ..data.batches import to_float
from ..diffusion import DiffusionProcess, LinearSchedule, Prediction, Schedule
from .laws import input_norm

BATCH = 512
UNIFORM_IMAGES, MOST_IMAGES = 4096, 10_000


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


def measure_inputs(
    images: Tensor, schedule: Schedule, *, prediction: Prediction = "epsilon", generator: Generator
) -> InputNorms:
    """Noise every image once, the times spread evenly. Shape: images (N, …) in [−1, 1], or latents; on any device."""
    if not images.is_floating_point() or images.ndim < 2 or not len(images):
        found = f"{tuple(images.shape)} of {images.dtype}"
        raise ValueError(f"needs images as floats of shape (count, …), in [-1, 1], got {found}")
    # Where the schedule, the noise and float64 are.
    images, process = images.cpu(), DiffusionProcess(schedule, prediction)
    times, norms = process.stratified_times(len(images), generator), []
    for x0, t in zip(images.split(BATCH), times.split(BATCH), strict=True):
        noise = torch.randn(x0.shape, generator=generator)
        noised = process.add_noise(x0, noise, t), process.target(x0, noise, t)
        norms.append([values.double().flatten(1).square().mean(1) for values in noised])
    inputs, targets = (torch.cat(column) for column in zip(*norms, strict=True))
    second_moment, mean_alpha_bar = images.double().square().mean(), schedule.alphas_cumprod.double().mean()
    return InputNorms(times, inputs, targets, second_moment.item(), mean_alpha_bar.item(), prediction)


def measure_datasets(cifar10: Path | None = None, *, seed: int = 0) -> dict[str, InputNorms]:
    """Uniform images, scikit-learn's digits, and CIFAR-10 where its folder of parquet files is given."""
    generator, schedule = Generator().manual_seed(seed), LinearSchedule()
    datasets = {"uniform": torch.rand(UNIFORM_IMAGES, 256, generator=generator) * 2 - 1}
    datasets["digits"] = float_images(DataConfig(source="sklearn:digits", image_size=8, channels=1, validation_count=1))
    if cifar10 is not None:
        datasets["CIFAR-10"] = cifar10_images(cifar10)
    return {name: measure_inputs(images, schedule, generator=generator) for name, images in datasets.items()}


def cifar10_images(folder: Path) -> Tensor:
    """Shape: (at most 10,000, 3, 32, 32), in [−1, 1]."""
    return float_images(DataConfig(source=str(folder), image_size=32, image_column="img", validation_count=1))


def float_images(config: DataConfig) -> Tensor:
    return to_float(load_images(config).train.images[:MOST_IMAGES])
