"""Lemma 3.2 on uniform and on real images."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Generator, Tensor

from ..data import DataConfig, load_images
from ..data.batches import to_float
from ..diffusion import LinearSchedule
from .input_norms import InputNorms, measure_inputs
from .laws import input_norm
from .verify import Check, check_mean, simultaneous_z

UNIFORM_IMAGES, MOST_IMAGES = 4096, 10_000


def measure_datasets(cifar10: Path | None = None, *, seed: int = 0) -> dict[str, InputNorms]:
    """Uniform images, scikit-learn's digits, and CIFAR-10 where its folder of parquet files is given."""
    generator = Generator().manual_seed(seed)
    datasets = {"uniform": torch.rand(UNIFORM_IMAGES, 256, generator=generator) * 2 - 1, "digits": digits_images()}
    if cifar10 is not None:
        datasets["CIFAR-10"] = cifar10_images(cifar10)
    schedule = LinearSchedule()
    return {name: measure_inputs(images, schedule, generator=generator) for name, images in datasets.items()}


def verify_inputs(datasets: dict[str, InputNorms]) -> list[Check]:
    """E‖x_t‖²/m against Lemma 3.2 for uniform data, and with the data's own E x_0² for all."""
    z, checks = simultaneous_z(len(datasets)), []
    for name, norms in datasets.items():
        lemma = input_norm(norms.mean_alpha_bar, 1)
        moment = 1 / 3 if name == "uniform" else norms.second_moment
        law = input_norm(norms.mean_alpha_bar, 1, second_moment=moment)
        half = z * norms.inputs.std().item() / len(norms.inputs) ** 0.5 / law
        note = "Lemma 3.2" if name == "uniform" else f"E x_0² = {moment:.3f}; Lemma 3.2 ({lemma:.4f}) assumes 1/3"
        checks.append(check_mean("E‖x_t‖²/m", f"{name}, linear schedule", law, norms.inputs.mean().item(), half, note))
    return checks


def digits_images() -> Tensor:
    """Shape: (1797 − 1, 1, 8, 8), in [−1, 1]."""
    return load(DataConfig(source="sklearn:digits", image_size=8, channels=1, validation_count=1))


def cifar10_images(folder: Path) -> Tensor:
    """Shape: (at most 10,000, 3, 32, 32), in [−1, 1]."""
    return load(DataConfig(source=str(folder), image_size=32, image_column="img", validation_count=1))


def load(config: DataConfig) -> Tensor:
    return to_float(load_images(config).train.images[:MOST_IMAGES])
