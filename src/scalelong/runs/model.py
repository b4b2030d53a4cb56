"""The network of a checkpoint."""

from __future__ import annotations

import json

from torch import nn

from ..config.build import build_model, lay_out
from ..config.schema import Config, Weights
from ..utils.device import own_device
from .checkpoint import Checkpoint
from .manifest import MANIFEST


def load_network(config: Config, checkpoint: Checkpoint, weights: Weights, *, compile: bool = False) -> nn.Module:
    """The network of a checkpoint, on this process's device and in the memory layout that it was trained in."""
    model = read_network(config, checkpoint, weights)
    lay_out(model, config.training, own_device())
    if compile:
        # For each size of batch by itself: code for any size would depend on the sizes that came before.
        model.compile(dynamic=False)
    return model


def read_network(config: Config, checkpoint: Checkpoint, weights: Weights) -> nn.Module:
    """The network of a checkpoint as it was built, in eval mode and on the CPU."""
    model = build_model(config)
    model.load_state_dict(checkpoint.tensors(group_of(weights)))
    return model.eval()


def group_of(weights: Weights) -> str:
    """The checkpoint's name for the weights."""
    return "ema" if weights == "ema" else "model"


def weights_digest(checkpoint: Checkpoint, weights: Weights) -> str:
    """SHA-256 of the weights' file, which was compared with it when the checkpoint was opened."""
    files = json.loads((checkpoint.path / MANIFEST).read_bytes())["files"]
    return files[f"{group_of(weights)}.safetensors"]["sha256"]
