"""What a run trains on: batches in memory, streamed or prepared, what is held out, and the empty caption."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import BatchDraws, Batches, BatchOrder, BatchSource, DataError, Examples, load_images, open_batches
from ..data.prepared import open_prepared, prepared_folder
from .schema import Config


@dataclass(frozen=True)
class Inputs:
    """One process's batches, the examples held out, and the features of the empty caption. Shape: (L, D)."""

    batches: BatchSource
    validation: Examples
    empty_text: Tensor | None = None


def open_inputs(config: Config, *, rank: int = 0, world: int = 1, device: torch.device | str = "cpu") -> Inputs:
    """Open a recipe's data; raises DataError where it is not as the recipe says."""
    draws = BatchDraws(config.training.batch_size, config.seed)
    classes = None if config.labels is None else config.labels.classes
    if config.text is None and config.latents is None:
        return Inputs(*open_batches(config.data, draws, classes=classes, rank=rank, world=world, device=device))
    images = load_images(config.data, classes=classes) if config.latents is None else None
    prepared = open_prepared(prepared_place(config), config.data, config.text, config.latents, images=images)
    check_width(config, prepared.empty_text)
    order = BatchOrder(len(prepared.train), draws.batch_size, draws.seed)
    flip = config.data.flip and config.latents is None
    batches = Batches(prepared.train, order, flip=flip, rank=rank, world=world, device=device)
    return Inputs(batches, prepared.validation, prepared.empty_text)


def check_width(config: Config, empty_text: Tensor | None) -> None:
    if config.text is None or empty_text is None:
        return
    encoder, stated, found = config.text.encoder, config.text.width, empty_text.shape[-1]
    if stated != found:
        raise DataError(f"text.width: {encoder!r} gives {found} numbers for a token, not {stated}")


def prepared_place(config: Config) -> Path:
    """The folder that `scalelong prepare` fills for a recipe."""
    return prepared_folder(config.name, config.data, config.text, config.latents)


def stream_positions(batches: BatchSource) -> list[dict[str, Any]]:
    """Where the stream of each process is; nothing if the data is in memory."""
    own = batches.state_dict()
    if not own:
        return []
    from accelerate.utils import gather_object

    return gather_object([own])
