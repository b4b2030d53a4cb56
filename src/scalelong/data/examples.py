"""What the trainer asks of data: examples that can be picked by index, or batches that come one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .loader import Batch


@dataclass(frozen=True)
class Picked:
    """Some examples. Shape: images (B, C, H, W), uint8 pixels or float latents; labels (B,), int64; text (B, L, D).

    `captions` are the drawn ones, one for each image, where they are held as words and not as features.
    """

    images: Tensor
    labels: Tensor | None = None
    text: Tensor | None = None
    captions: tuple[str, ...] | None = None


class Examples(Protocol):
    """A set with random access.

    `seeds` (B,), int64, is one number for each example and step: whatever is drawn (which of several captions, the
    noise of a latent) is a function of it.
    """

    def __len__(self) -> int: ...

    def pick(self, indices: Tensor, seeds: Tensor) -> Picked: ...


class BatchSource(Protocol):
    """Batches of one process, whether of a set with random access or of a stream.

    `at(step)` is called for one step after another; a stream raises where a step is left out or repeated. What
    `state_dict` gives is small, holds what JSON can, belongs to this process, and says where the batch after the last
    one begins; a set with random access has none.
    """

    @property
    def own(self) -> slice:
        """The positions of every global batch that are this process's own."""
        ...

    def at(self, step: int) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def caption_of(seed: int, count: int) -> int:
    """Which of an example's captions is drawn: each as likely as the others, and a function of the example's seed.

    >>> caption_of(7, 5)
    2
    """
    # Seeds are uniform below 2^63, so that the remainder favours no caption that could be noticed.
    return seed % count
