"""What a feature network is: a frozen function of bytes, and the facts about it that stand in every result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.device import own_device

INCEPTION, EFFICIENTNET = "inception", "efficientnet-lite0"
KNOWN = f"{INCEPTION}, {INCEPTION}:WEIGHTS, {EFFICIENTNET}, a TorchScript file, or a transformers vision model"

BATCH = 32


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
        if self.size is None:
            return "none"
        return f"{self.mode} to {self.size} px{' with antialiasing' if self.antialias else ''}"

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

    def __call__(self, images: Tensor, told: Callable[[float], None] = lambda share: None) -> Tensor:
        """Features of images, in batches; grey images are repeated. Shape: (B, C, H, W), uint8 → (B, D), float32."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(f"images are uint8 of shape (B, 1 or 3, H, W), not {images.dtype} {tuple(images.shape)}")
        return torch.cat(list(self._batches(images, told)))

    def _batches(self, images: Tensor, told: Callable[[float], None]) -> Iterator[Tensor]:
        device = own_device()
        with torch.inference_mode():
            for number, batch in enumerate(images.split(BATCH)):
                told(number * BATCH / max(len(images), 1))
                # Always as many: a smaller batch may be rounded otherwise.
                filled = F.pad(batch, (0, 0) * 3 + (0, BATCH - len(batch)))
                features = self.forward(filled.to(device).expand(-1, 3, -1, -1))[: len(batch)]
                yield self._checked(features.flatten(1).float().cpu())

    def _checked(self, features: Tensor) -> Tensor:
        if not torch.isfinite(features).all():
            raise FeatureError(
                f"{self.name} gives features that are not finite: its weights, or its images, are broken"
            )
        return features


def hash_of_images(images: Iterator[Tensor]) -> str:
    """A hash of pixels, whatever the parts they come in."""
    digest = hashlib.sha256()
    for part in images:
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()
