"""Images from a trained run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..diffusion import noise_predictor, sample, to_uint8
from .build import build_model, build_process
from .checkpoint import Checkpoint
from .config import Config
from .engine import best_device
from .pictures import save_grid, save_images
from .run import Run, RunError

Weights = Literal["ema", "raw"]

BATCH = 64


def sample_run(
    folder: str | Path, count: int = 64, *, steps: int = 50, seed: int = 0, weights: Weights = "ema"
) -> Path:
    """Draw images with a run's last checkpoint; returns the folder of the PNGs and `grid.png`.

    Image k has the seed `seed + k`, so it does not depend on how many are drawn. The folder is complete or absent.
    """
    run = Run(Path(folder))
    config, checkpoint = run.config(), run.checkpoints().latest()
    if checkpoint is None:
        raise RunError(f"{run.folder} has no checkpoint yet")
    model = load_network(config, checkpoint, weights)
    images = draw(model, config, count, steps=steps, seed=seed)
    name = f"step-{checkpoint.step:06d}-{weights}-seed-{seed}-{steps}-steps"
    return write_folder(images, run.samples / name)


def load_network(config: Config, checkpoint: Checkpoint, weights: Weights) -> nn.Module:
    model = build_model(config)
    model.load_state_dict(checkpoint.tensors("ema" if weights == "ema" else "model"))
    return model.eval().to(best_device())


def draw(model: nn.Module, config: Config, count: int, *, steps: int, seed: int = 0) -> Tensor:
    """Images of a model in eval mode, image k from the seed `seed + k`. Shape: (count, C, H, W), uint8."""
    process, device = build_process(config.diffusion), next(model.parameters()).device
    batches = []
    for seeds in torch.arange(seed, seed + count).split(BATCH):
        images = sample(
            noise_predictor(model),
            process,
            config.data.image_shape,
            seeds=seeds.tolist(),
            steps=steps,
            device=device,
        )
        batches.append(to_uint8(images).cpu())
    return torch.cat(batches)


def write_folder(images: Tensor, folder: Path) -> Path:
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    try:
        save_images(images, temporary)
        save_grid(images, temporary / "grid.png")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
