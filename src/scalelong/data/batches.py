"""Batches: which images make up a step is a function of seed and step alone, so that resuming needs no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ..utils.runtime import keyed_generator


@dataclass(frozen=True)
class Picked:
    """Some examples. Shape: images (B, C, H, W), uint8 pixels or float latents; labels (B,), int64; text (B, L, D).

    `captions` are the chosen ones, one for each image, where they are held as words and not as features.
    """

    images: Tensor
    labels: Tensor | None = None
    text: Tensor | None = None
    captions: tuple[str, ...] | None = None


class Examples(Protocol):
    """A set with random access; what is random (one of several captions, a latent's noise) is a function of `seeds`.

    Shape: indices (B,), seeds (B,), int64, one number for each example and step.
    """

    def __len__(self) -> int: ...

    def pick(self, indices: Tensor, seeds: Tensor) -> Picked: ...


def caption_of(seed: int, count: int) -> int:
    """Which of an example's captions is chosen: each as likely as the others, and a function of the example's seed.

    >>> caption_of(7, 5)
    2
    """
    # Seeds are uniform below 2^63, so that the remainder favours no caption that could be noticed.
    return seed % count


@dataclass(frozen=True)
class ImageSet:
    """Images in memory, perhaps with labels and captions. Shape: images (N, C, H, W), uint8; labels (N,), int64."""

    images: Tensor
    labels: Tensor | None = None
    captions: Sequence[tuple[str, ...]] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def pick(self, indices: Tensor, seeds: Tensor) -> Picked:
        """Some of the images, with one caption chosen for each. Shape: (B,), (B,) → (B, C, H, W)."""
        labels = None if self.labels is None else self.labels.index_select(0, indices)
        captions = None
        if self.captions is not None:
            chosen = zip((self.captions[index] for index in indices.tolist()), seeds.tolist(), strict=True)
            captions = tuple(several[caption_of(seed, len(several))] for several, seed in chosen)
        return Picked(self.images.index_select(0, indices), labels, captions=captions)


@dataclass(frozen=True)
class BatchOrder:
    """The indices of global batch k: a stretch of one endless sequence of epochs, each a permutation of all images.

    A batch may span two epochs, so every image comes exactly once in each. Several processes take contiguous slices
    of the same batch, in the order of their ranks.

    >>> order = BatchOrder(size=5, batch_size=2, seed=0)
    >>> sorted(torch.cat([order.indices(step) for step in range(5)]).tolist())
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """

    size: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.batch_size < 1:
            raise ValueError(f"need at least one image and one per batch, got {self.size} and {self.batch_size}")

    def indices(self, step: int) -> Tensor:
        """The images of global batch `step`, counted from 0. Shape: (batch_size,), int64."""
        if step < 0:
            raise ValueError(f"steps are counted from 0, got {step}")
        start, stop = step * self.batch_size, (step + 1) * self.batch_size
        parts = []
        for epoch in range(start // self.size, (stop - 1) // self.size + 1):
            first = epoch * self.size
            parts.append(permutation(self.size, self.seed, epoch)[max(start - first, 0) : stop - first])
        return torch.cat(parts)

    def flips(self, step: int) -> Tensor:
        """Which images of global batch `step` are mirrored, one half on average. Shape: (batch_size,), bool."""
        return torch.rand(self.batch_size, generator=keyed_generator(self.seed, "flips", step)) < 0.5

    def seeds(self, step: int) -> Tensor:
        """One number for each example of global batch `step`, below 2^63. Shape: (batch_size,), int64."""
        return torch.randint(2**63 - 1, (self.batch_size,), generator=keyed_generator(self.seed, "examples", step))

    def slice_of(self, rank: int, world: int) -> slice:
        """The positions of every global batch that are one process's own: contiguous, in the order of the ranks."""
        if not 0 <= rank < world:
            raise ValueError(f"rank must lie in 0 … {world - 1}, got {rank}")
        if self.batch_size % world:
            shared = f"a global batch of {self.batch_size} cannot be shared evenly by {world} processes"
            raise ValueError(f"{shared}: set training.batch_size to a multiple of {world}")
        own = self.batch_size // world
        return slice(rank * own, (rank + 1) * own)


# A batch holds the end of one epoch and the start of the next, unless epochs are tiny.
@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> Tensor:
    """The order of the images in an epoch. Shape: (size,), int64."""
    return torch.randperm(size, generator=keyed_generator(seed, "epoch", epoch))


@dataclass(frozen=True)
class Batch(Picked):
    """One process's part of a global batch, as the network takes it: images in [-1, 1], or latents."""

    step: int = field(kw_only=True)

    def __len__(self) -> int:
        return len(self.images)


class Batches:
    """The batches of one process: `batches.at(k)` is that of step k; `flip` mirrors half of the images."""

    # No thread reads ahead: it made no step shorter, from memory, from a warm or from a cold image cache.

    def __init__(
        self,
        data: Examples,
        order: BatchOrder,
        *,
        flip: bool = False,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(data) != order.size:
            raise ValueError(f"the order is of {order.size} images, but there are {len(data)}")
        self.data, self.order, self.flip = data, order, flip
        self.own = order.slice_of(rank, world)
        self.device = torch.device(device)

    def at(self, step: int) -> Batch:
        """The batch of a step, whichever came before."""
        indices, seeds = self.order.indices(step)[self.own], self.order.seeds(step)[self.own]
        flips = self.order.flips(step)[self.own] if self.flip else None
        return make_batch(step, self.data.pick(indices, seeds), flips=flips, device=self.device)


def make_batch(step: int, picked: Picked, *, flips: Tensor | None, device: torch.device) -> Batch:
    """What was picked, as the network takes it: pixels mirrored where `flips` says, in [-1, 1]; latents as they are."""
    images = to_device(picked.images, device)
    if images.dtype == torch.uint8:
        if flips is not None:
            images = torch.where(to_device(flips, device).view(-1, 1, 1, 1), images.flip(-1), images)
        images = to_float(images)
    labels, text = (None if part is None else to_device(part, device) for part in (picked.labels, picked.text))
    return Batch(images, labels, text, picked.captions, step=step)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """With CUDA the copy runs beside the computation, from pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_float(images: Tensor) -> Tensor:
    """Grey levels 0 … 255 as numbers from -1 to 1, both reached exactly. Shape: any, kept.

    >>> to_float(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    [-1.0, 1.0]
    """
    return images.float().div_(127.5).sub_(1)
