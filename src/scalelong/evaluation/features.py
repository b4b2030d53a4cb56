"""Feature networks: frozen functions of images whose name and weights stand in every result, how they read images, and
their features of many images in numbered blocks that several processes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.blocks import BlockFolder, Fingerprint, Progress, block_ranges
from ..utils.process import Rank, own_device
from ..utils.tensors import read_tensors

BATCH = 32
# A multiple of what is sampled at once, so that no image is sampled in another batch than it would be alone.
BLOCK = 256

ShareDone = Callable[[float], None]
"""Called with the share of some work that is done."""
Describe = Callable[[range, ShareDone], Tensor]
"""The features of the images of these numbers; those that cannot be read are left out. Shape: (B, D)."""


class FeatureError(ValueError):
    """A feature network that cannot be had, or does not work; the message says what to do."""


@dataclass(frozen=True)
class Resize:
    """From bytes to what a network reads: resized to a square, then (x/255 − mean) / std."""

    size: int | None
    mode: Literal["bilinear", "bicubic"] = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    def __call__(self, images: Tensor) -> Tensor:
        """Shape: (B, 3, H, W), uint8 → (B, 3, size, size), float32."""
        x = images.float() / 255
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode=self.mode, align_corners=False, antialias=self.antialias)
        mean, std = (x.new_tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std

    def __str__(self) -> str:
        how = f"{self.mode} to {self.size} px{' with antialiasing' if self.antialias else ''}"
        return "none" if self.size is None else how

    @property
    def in_full(self) -> str:
        """With mean and deviation, for a network whose name does not imply them.

        >>> Resize(32, mean=(0.5,) * 3, std=(0.25,) * 3).in_full
        'bilinear to 32 px with antialiasing, mean 0.5 0.5 0.5, deviation 0.25 0.25 0.25'
        """
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"{self}, mean {mean}, deviation {std}"


@dataclass(frozen=True)
class FeatureNetwork:
    """A frozen network and what must be equal for two figures to be compared."""

    name: str
    weights: str
    """The SHA-256 of the weights, shortened."""
    resize: str
    distance: str
    """What the Fréchet distance on these features is called. Only the original network's is the FID."""
    forward: Callable[[Tensor], Tensor]

    @property
    def fingerprint(self) -> Fingerprint:
        return {"network": self.name, "weights": self.weights, "resize": self.resize}

    def __call__(self, images: Tensor, progress: ShareDone = lambda share: None) -> Tensor:
        """Features of images, in batches; grey images are repeated. Shape: (B, C, H, W), uint8 → (B, D), float32."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(f"images are uint8 of shape (B, 1 or 3, H, W), not {images.dtype} {tuple(images.shape)}")
        parts = []
        for number, batch in enumerate(images.split(BATCH)):
            progress(number * BATCH / max(len(images), 1))
            parts.append(self._features(batch))
        return torch.cat(parts)

    @torch.inference_mode()
    def _features(self, batch: Tensor) -> Tensor:
        # Always as many: a smaller batch may be rounded otherwise.
        filled = F.pad(batch, (0, 0) * 3 + (0, BATCH - len(batch)))
        features = self.forward(filled.to(own_device()).expand(-1, 3, -1, -1))[: len(batch)].flatten(1).float().cpu()
        if not torch.isfinite(features).all():
            raise FeatureError(f"{self.name} gives features that are not finite: its weights or images are broken")
        return features


def fill_features(
    folder: Path, fingerprint: Fingerprint, count: int, describe: Describe, rank: Rank, progress: Progress
) -> bool:
    """Compute this process's share of the features that are missing; True in the first one, once all are there."""
    store = BlockFolder(folder)

    def make(name: str, numbers: range, done: ShareDone) -> None:
        features = describe(numbers, done)
        store.add(name, {"features": features.float()}, rows=len(features))

    return store.fill(fingerprint, block_ranges(count, BLOCK), make, rank, progress)


def stored_features(folder: Path, count: int) -> Iterator[Tensor]:
    """The features of one block after another. Shape: (B, D), float32."""
    store = BlockFolder(folder)
    return (read_tensors(store.shard(name))["features"] for name in block_ranges(count, BLOCK))
