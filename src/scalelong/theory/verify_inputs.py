"""Lemma 3.2 on uniform and on real images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from ..diffusion import LinearSchedule
from ..kappa.input_norms import InputNorms, measure_inputs
from .laws import input_norm
from .verify import WIDEST, Check, simultaneous_z

if TYPE_CHECKING:
    from ..data import DataConfig

UNIFORM_IMAGES, MOST_IMAGES = 4096, 10_000


@dataclass(frozen=True)
class MeasuredData:
    """One dataset's name and norms."""

    name: str
    norms: InputNorms


def measure_datasets(cifar10: Path | None = None, *, seed: int = 0) -> list[MeasuredData]:
    """Uniform images, scikit-learn's digits, and CIFAR-10 where its folder of parquet files is given."""
    generator = Generator().manual_seed(seed)
    uniform = torch.rand(UNIFORM_IMAGES, 256, generator=generator) * 2 - 1
    named = [("uniform", uniform), ("digits", digits_images())]
    named += [("CIFAR-10", cifar10_images(cifar10))] if cifar10 is not None else []
    return [MeasuredData(name, measure_inputs(images, LinearSchedule(), generator=generator)) for name, images in named]


def verify_inputs(datasets: list[MeasuredData]) -> list[Check]:
    """E‖x_t‖²/m against Lemma 3.2 for uniform data, and with the data's own E x_0² for all."""
    z, checks = simultaneous_z(len(datasets)), []
    for data in datasets:
        norms, lemma = data.norms, input_norm(data.norms.mean_alpha_bar, 1)
        moment = 1 / 3 if data.name == "uniform" else norms.second_moment
        law = input_norm(norms.mean_alpha_bar, 1, second_moment=moment)
        mean, half = norms.inputs.mean().item(), z * norms.inputs.std().item() / len(norms.inputs) ** 0.5 / law
        note = "Lemma 3.2" if data.name == "uniform" else f"E x_0² = {moment:.3f}; Lemma 3.2 ({lemma:.4f}) assumes 1/3"
        inside = abs(mean / law - 1) <= half <= WIDEST
        checks.append(Check("E‖x_t‖²/m", f"{data.name}, linear schedule", law, mean, half, inside, note))
    return checks


def digits_images() -> Tensor:
    """Shape: (1797 − 1, 1, 8, 8), in [−1, 1]."""
    from ..data import DataConfig

    return load(DataConfig(source="sklearn:digits", image_size=8, channels=1, validation_count=1))


def cifar10_images(folder: Path) -> Tensor:
    """Shape: (at most 10,000, 3, 32, 32), in [−1, 1]."""
    from ..data import DataConfig

    return load(DataConfig(source=str(folder), image_size=32, image_column="img", validation_count=1))


def load(config: DataConfig) -> Tensor:
    from ..data import load_images
    from ..data.batches import to_float

    return to_float(load_images(config).train.images[:MOST_IMAGES])
