"""What a run trains on: its batches, the examples for validation, and the features of the empty caption."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..data import Batches, BatchOrder, DataError, Examples, Progress
from ..data.dataset import cache_folder, open_images
from ..data.prepare import Job
from ..data.prepared import open_prepared, prepared_folder
from .schema import Config


@dataclass(frozen=True)
class Inputs:
    """One process's batches, the examples for validation, and the features of the empty caption. Shape: (L, D)."""

    batches: Batches
    validation: Examples
    empty_text: Tensor | None = None


def open_inputs(
    config: Config,
    *,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Inputs:
    """Open a recipe's data; raises DataError where it is not as the recipe says.

    Where the images must be decoded first, `progress` is told how many are. One process of each machine decodes what
    goes into the image cache; the others wait for it.
    """
    classes = None if config.labels is None else config.labels.classes
    images = None if config.latents is not None else open_images(config.data, classes=classes, progress=progress)
    if images is not None and config.text is None:
        (train, validation), empty_text = images, None
    else:
        job = Job(config.data, config.text, config.latents, prepared_place(config))
        prepared = open_prepared(job, images=images)
        train, validation, empty_text = prepared.train, prepared.validation, prepared.empty_text
        check_width(config, empty_text)
    order = BatchOrder(len(train), config.training.batch_size, config.seed)
    flip = config.data.flip and config.latents is None
    batches = Batches(train, order, flip=flip, rank=rank, world=world, device=device)
    return Inputs(batches, validation, empty_text)


def check_width(config: Config, empty_text: Tensor | None) -> None:
    if config.text is None or empty_text is None:
        return
    encoder, stated, found = config.text.encoder, config.text.width, empty_text.shape[-1]
    if stated != found:
        raise DataError(f"text.width: {encoder!r} gives {found} numbers for a token, not {stated}")


def prepared_place(config: Config) -> Path:
    """The folder that `scalelong prepare` fills for a recipe."""
    if config.text is None and config.latents is None:
        return cache_folder(config.data)
    return prepared_folder(config.name, config.data, config.text, config.latents)
