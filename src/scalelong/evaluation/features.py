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

from ..utils.atomic import read_tensors
from ..utils.block_folder import BlockFolder, Fingerprint, Progress, block_ranges
from ..utils.runtime import Rank, own_device

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
    mode: Literal["bilinear", "bicubic", "tf1"] = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    clipped: bool = False
    """Bicubic interpolation leaves the range of the bytes, which some libraries cut off again."""

    def __call__(self, images: Tensor) -> Tensor:
        """Shape: (B, 3, H, W), uint8 → (B, 3, size, size), float32."""
        x = images.float() / 255
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = self._resized(x, self.size)
        mean, std = (x.new_tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std

    def _resized(self, x: Tensor, size: int) -> Tensor:
        if self.mode == "tf1":
            return resize_as_tensorflow1(x, size)
        # With antialiasing these are PIL's kernels, but for rounding.
        x = F.interpolate(x, (size, size), mode=self.mode, align_corners=False, antialias=self.antialias)
        return x.clamp(0, 1) if self.clipped else x

    def __str__(self) -> str:
        if self.size is None:
            return "none"
        if self.mode == "tf1":
            return f"bilinear to {self.size} px as TensorFlow 1"
        how = " with antialiasing" if self.antialias else ""
        return f"{self.mode} to {self.size} px{how}{', clipped' if self.clipped else ''}"

    @property
    def in_full(self) -> str:
        """With mean and deviation, for a network whose name does not imply them.

        >>> Resize(32, mean=(0.5,) * 3, std=(0.25,) * 3).in_full
        'bilinear to 32 px with antialiasing, mean 0.5 0.5 0.5, deviation 0.25 0.25 0.25'
        """
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"{self}, mean {mean}, deviation {std}"


def resize_as_tensorflow1(x: Tensor, size: int) -> Tensor:
    """Bilinear, with pixel i of the result at i·old/new of the image: later resizes count from the pixels' centres.

    >>> resize_as_tensorflow1(torch.tensor([0.0, 4.0]).expand(1, 1, 2, 2), 4)[0, 0, 0].tolist()
    [0.0, 2.0, 4.0, 4.0]
    """
    for dimension in (-2, -1):
        old = x.shape[dimension]
        places = torch.arange(size, device=x.device) * (old / size)
        below = places.long()
        above = (below + 1).clamp_max(old - 1)
        share = (places - below).view(-1, 1) if dimension == -2 else places - below
        x = torch.lerp(x.index_select(dimension, below), x.index_select(dimension, above), share)
    return x


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
    classifier: Tensor | None = None
    """Where the Inception Score is defined, what gives the logits of features. Shape: (classes, D)."""
    width: int | None = None
    """How many numbers the features have, where that is known before an image is read."""
    with_spatial: FeatureNetwork | None = None
    """The same network, whose rows go on with the spatial features of the sFID."""

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
