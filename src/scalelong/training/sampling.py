"""Images from a trained run."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..data.encoders import LatentEncoder, TextEncoder
from ..diffusion import sample, to_uint8
from .build import build_model, build_process
from .checkpoint import Checkpoint
from .conditions import NOTHING, Condition, Conditioning, conditioning_of, spread_labels
from .config import Config
from .engine import best_device
from .inputs import Inputs, open_inputs
from .pictures import save_grid, save_images
from .run import Run, RunError

Weights = Literal["ema", "raw"]

BATCH = 64


@dataclass(frozen=True)
class Wish:
    """What to draw: images of a class, or of a prompt, else of all classes by turns or of held-out captions."""

    label: int | None = None
    prompt: str | None = None


def sample_run(
    folder: str | Path,
    count: int = 64,
    *,
    steps: int | None = None,
    sampler: str | None = None,
    guidance: float | None = None,
    wish: Wish | None = None,
    seed: int = 0,
    weights: Weights = "ema",
) -> Path:
    """Draw images with a run's last checkpoint; returns the folder of the PNGs and `grid.png`.

    Image k has the seed `seed + k`, so it does not depend on how many are drawn. The folder is complete or absent.
    What is not given is as the recipe's `sampling:` block says.
    """
    run, wish = Run(Path(folder)), wish or Wish()
    given = {"steps": steps, "sampler": sampler, "guidance": guidance}
    config = with_sampling(run.config(), **{key: value for key, value in given.items() if value is not None})
    checkpoint = run.checkpoints().latest()
    if checkpoint is None:
        raise RunError(f"{run.folder} has no checkpoint yet")
    conditioning, condition = grant(config, wish, count)
    model = load_network(config, checkpoint, weights)
    images = draw(model, config, conditioning, condition, count=count, seed=seed)
    return write_folder(images, run.samples / title(config, wish, checkpoint.step, weights, seed))


def with_sampling(config: Config, **given: object) -> Config:
    """The recipe with other settings of its `sampling:` block, checked like the recipe's own."""
    block = {**config.sampling.model_dump(), **given}
    return Config.model_validate({**config.model_dump(), "sampling": block})


def title(config: Config, wish: Wish, step: int, weights: Weights, seed: int) -> str:
    """A name for a folder of samples that says how they were drawn; a prompt may hold anything, and is left out."""
    sampling = config.sampling
    parts = [f"step-{step:06d}-{weights}-seed-{seed}-{sampling.sampler}-{sampling.steps}-steps"]
    parts += [f"guidance-{sampling.guidance:g}"] if config.conditional else []
    parts += [f"class-{wish.label}"] if wish.label is not None else []
    return "-".join(parts + (["prompt"] if wish.prompt is not None else []))


def load_network(config: Config, checkpoint: Checkpoint, weights: Weights) -> nn.Module:
    model = build_model(config)
    model.load_state_dict(checkpoint.tensors("ema" if weights == "ema" else "model"))
    return model.eval().to(best_device())


def grant(config: Config, wish: Wish, count: int) -> tuple[Conditioning, Condition]:
    """How the network is conditioned, and the condition of each image to be drawn."""
    if wish.label is not None and config.labels is None:
        raise ValueError("this run has no classes to choose from")
    if wish.prompt is not None and config.text is None:
        raise ValueError("this run knows no text: leave the prompt out")
    if config.text is None:
        return conditioning_of(config), spread_labels(config, count, wish.label)
    if wish.prompt is not None:
        text, empty = TextEncoder(config.text, best_device()).encode([wish.prompt, ""]).clone().cpu()
        return conditioning_of(config, empty), Condition(text=text.expand(count, -1, -1))
    inputs = open_inputs(config)
    conditioning = conditioning_of(config, inputs.empty_text)
    return conditioning, heldout_condition(inputs, conditioning, count)


def heldout_condition(inputs: Inputs, conditioning: Conditioning, count: int) -> Condition:
    """The conditions of the first held-out examples, over and over if there are fewer."""
    rows = torch.arange(count) % len(inputs.heldout)
    return conditioning.of(inputs.heldout.pick(rows, torch.zeros_like(rows)))


def draw(
    model: nn.Module,
    config: Config,
    conditioning: Conditioning,
    condition: Condition = NOTHING,
    *,
    count: int,
    seed: int = 0,
) -> Tensor:
    """Images of a model in eval mode, image k from the seed `seed + k`. Shape: (count, C, H, W), uint8."""
    process, device, sampling = build_process(config.diffusion), next(model.parameters()).device, config.sampling
    batches = []
    for start in range(0, count, BATCH):
        own = slice(start, min(start + BATCH, count))
        drawn = sample(
            conditioning.guided(model, condition[own].to(device), sampling.guidance),
            process,
            config.sample_shape,
            seeds=range(seed + own.start, seed + own.stop),
            steps=min(sampling.steps, config.diffusion.steps),
            sampler=sampling.sampler,
            clip=config.latents is None,
            device=device,
        )
        batches.append(drawn.cpu())
    return to_uint8(decoded(torch.cat(batches), config, device))


def decoded(drawn: Tensor, config: Config, device: torch.device) -> Tensor:
    """Images from latents; images themselves."""
    return drawn if config.latents is None else LatentEncoder(config.latents, device).decode(drawn).cpu()


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
