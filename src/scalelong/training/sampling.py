"""Images from a trained run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.encoders import LatentEncoder, TextEncoder
from ..diffusion import sample, to_uint8
from .build import build_model, build_process
from .checkpoint import Checkpoint
from .conditions import NOTHING, Condition, Conditioning, conditioning_of, spread_labels
from .config import Config, Weights
from .engine import best_device, check_compiler
from .inputs import Inputs, open_inputs
from .layout import lay_out
from .manifest import MANIFEST
from .run import Run, RunError
from .sample_folder import Draw, Progress, Ranks, SampleFolder

Conditions = Callable[[range], Condition]
"""The conditions of the images of these numbers."""

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
    batch: int = BATCH,
    compile: bool = False,
    progress: Progress = lambda done, count: None,
) -> Path:
    """Draw images with a run's last checkpoint; returns the folder of the PNGs and `grid.png`, complete or absent.

    Image k has the seed `seed + k`, so it does not depend on how many are drawn. Images that are there are not drawn
    again, after an interruption or for a larger `count`; processes started by torchrun share the rest. At the same
    `batch` the files are the same to the bit; `compile` takes its time once for every size of batch, draws faster then,
    and has a folder of its own. What is not given is as the recipe's `sampling:` block says.
    """
    run, wish = Run(Path(folder)), wish or Wish()
    given = {"steps": steps, "sampler": sampler, "guidance": guidance}
    config = with_sampling(run.config(), **{key: value for key, value in given.items() if value is not None})
    checkpoint = run.checkpoints().latest()
    if checkpoint is None:
        raise RunError(f"{run.folder} has no checkpoint yet")
    check_wish(config, wish)
    settings = describe_drawing(config, wish, checkpoint, weights, seed)
    name = title(config, wish, checkpoint.step, weights, seed)
    if compile:
        check_compiler(best_device())
        # Compiled code rounds differently: a grey level here and there.
        settings, name = {**settings, "compiled": True}, f"{name}-compiled"

    def draw() -> Draw:
        conditioning, conditions = conditions_of(config, wish)
        network = load_network(config, checkpoint, weights, compile=compile)
        return Artist(network, config, conditioning, conditions, seed).draw

    place = run.samples / name
    SampleFolder(place, settings, count, batch, config.data.image_shape).fill(draw, Ranks.here(), progress)
    return place


def describe_drawing(config: Config, wish: Wish, checkpoint: Checkpoint, weights: Weights, seed: int) -> dict[str, Any]:
    """All that an image depends on, besides its number and its batch."""
    sampling = config.sampling
    return {
        "weights": weights,
        "step": checkpoint.step,
        "sha256": weights_digest(checkpoint, weights),
        "seed": seed,
        "sampler": sampling.sampler,
        "steps": min(sampling.steps, config.diffusion.steps),
        "guidance": sampling.guidance if config.conditional else None,
        "class": wish.label,
        "prompt": wish.prompt,
    }


def weights_digest(checkpoint: Checkpoint, weights: Weights) -> str:
    """SHA-256 of the weights' file, which was compared with it when the checkpoint was opened."""
    files = json.loads((checkpoint.path / MANIFEST).read_bytes())["files"]
    return files[f"{group_of(weights)}.safetensors"]["sha256"]


def group_of(weights: Weights) -> str:
    """The checkpoint's name for the weights."""
    return "ema" if weights == "ema" else "model"


def with_sampling(config: Config, **given: object) -> Config:
    """The recipe with other settings of its `sampling:` block, checked like the recipe's own."""
    block = {**config.sampling.model_dump(), **given}
    return Config.model_validate({**config.model_dump(), "sampling": block})


def title(config: Config, wish: Wish, step: int, weights: Weights, seed: int) -> str:
    """A name for a folder of samples that says how they were drawn; for a prompt, which may hold anything, its hash."""
    sampling = config.sampling
    parts = [f"step-{step:06d}-{weights}-seed-{seed}-{sampling.sampler}-{sampling.steps}-steps"]
    parts += [f"guidance-{sampling.guidance:g}"] if config.conditional else []
    parts += [f"class-{wish.label}"] if wish.label is not None else []
    parts += [f"prompt-{hashlib.sha256(wish.prompt.encode()).hexdigest()[:8]}"] if wish.prompt is not None else []
    return "-".join(parts)


def load_network(config: Config, checkpoint: Checkpoint, weights: Weights, *, compile: bool = False) -> nn.Module:
    """The network of a checkpoint, on this process's device and in the memory layout that it was trained in."""
    model = read_network(config, checkpoint, weights)
    lay_out(model.to(own_device()), config.training)
    if compile:
        # For each size of batch by itself: code for any size would depend on the sizes that came before.
        model.compile(dynamic=False)
    return model


def read_network(config: Config, checkpoint: Checkpoint, weights: Weights) -> nn.Module:
    """The network of a checkpoint as it was built, in eval mode and on the CPU."""
    model = build_model(config)
    model.load_state_dict(checkpoint.tensors(group_of(weights)))
    return model.eval()


def own_device() -> str:
    """The best device; of several GPUs that of this process."""
    device = best_device()
    if device != "cuda":
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def check_wish(config: Config, wish: Wish) -> None:
    if wish.label is not None and config.labels is None:
        raise ValueError("this run has no classes to choose from")
    if wish.prompt is not None and config.text is None:
        raise ValueError("this run knows no text: leave the prompt out")
    spread_labels(config, 1, wish.label)


def grant(config: Config, wish: Wish, count: int) -> tuple[Conditioning, Condition]:
    """How the network is conditioned, and the condition of each image to be drawn."""
    check_wish(config, wish)
    conditioning, conditions = conditions_of(config, wish)
    return conditioning, conditions(range(count))


def conditions_of(config: Config, wish: Wish) -> tuple[Conditioning, Conditions]:
    """How the network is conditioned, and on what for any images: the text of all of them may not fit in memory."""
    if config.text is None:
        return conditioning_of(config), lambda own: spread_labels(config, own.stop, wish.label)[own.start : own.stop]
    if wish.prompt is not None:
        text, empty = TextEncoder(config.text, own_device()).encode([wish.prompt, ""]).clone().cpu()
        return conditioning_of(config, empty), lambda own: Condition(text=text.expand(len(own), -1, -1))
    inputs = open_inputs(config)
    conditioning = conditioning_of(config, inputs.empty_text)
    return conditioning, lambda own: heldout_condition(inputs, conditioning, len(own), first=own.start)


def heldout_condition(inputs: Inputs, conditioning: Conditioning, count: int, *, first: int = 0) -> Condition:
    """The conditions of the held-out examples from the first on, over and over if there are fewer."""
    rows = torch.arange(first, first + count) % len(inputs.heldout)
    return conditioning.of(inputs.heldout.pick(rows, torch.zeros_like(rows)))


@dataclass(frozen=True)
class Artist:
    """A model in eval mode, and all that it takes to draw images of it; image k is drawn from the seed `seed + k`."""

    model: nn.Module
    config: Config
    conditioning: Conditioning
    conditions: Conditions
    seed: int = 0

    def draw(self, numbers: range, progress: Callable[[float], None] = lambda share: None) -> Tensor:
        """Images, in one batch. Shape: (len(numbers), C, H, W), uint8."""
        config, sampling = self.config, self.config.sampling
        drawn = sample(
            self.conditioning.guided(self.model, self.conditions(numbers).to(self.device), sampling.guidance),
            build_process(config.diffusion),
            config.sample_shape,
            seeds=[self.seed + number for number in numbers],
            steps=min(sampling.steps, config.diffusion.steps),
            sampler=sampling.sampler,
            clip=config.latents is None,
            device=self.device,
            progress=lambda done, steps: progress(done / steps),
        )
        return to_uint8(drawn if self.decoder is None else self.decoder.decode(drawn)).cpu()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def decoder(self) -> LatentEncoder | None:
        latents = self.config.latents
        return None if latents is None else LatentEncoder(latents, self.device)


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
    artist = Artist(model, config, conditioning, lambda own: condition[own.start : own.stop], seed)
    starts = range(0, count, BATCH)
    return torch.cat([artist.draw(range(start, min(start + BATCH, count))) for start in starts])
