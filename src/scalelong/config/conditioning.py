"""The conditioning of a recipe."""

from __future__ import annotations

import torch
from torch import Tensor

from ..diffusion.guidance import NOTHING, Condition, Conditioning
from .schema import Config, UViTConfig


def conditioning_of(config: Config, empty_text: Tensor | None = None) -> Conditioning:
    """The conditioning of a recipe; one with text needs the features of the empty caption to drop_condition it."""
    names = ("y", "context") if isinstance(config.model, UViTConfig) else ("class_labels", "encoder_hidden_states")
    labels, text = config.labels, config.text
    drops = [block.drop for block in (labels, text) if block is not None]
    return Conditioning(
        names,
        takes_labels=labels is not None,
        takes_text=text is not None,
        no_label=labels.classes if labels is not None and labels.drop > 0 else None,
        empty_text=empty_text,
        drop=max(drops, default=0.0),
    )


def spread_labels(config: Config, count: int, label: int | None = None) -> Condition:
    """Labels for drawn images: all of one class, or class after class."""
    if config.labels is None:
        return NOTHING
    classes = config.labels.classes
    if label is not None and not 0 <= label < classes:
        raise ValueError(f"there are the classes 0 to {classes - 1}, not {label}")
    labels = torch.arange(count) % classes if label is None else torch.full((count,), label)
    return Condition(labels=labels)
