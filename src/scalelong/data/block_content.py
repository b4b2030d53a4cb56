"""What a block of rows holds: the images themselves or the encoders' results, in the form in which they are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from .columns import Captions
from .config import LatentConfig, TextConfig
from .encoders import LatentEncoder, TextEncoder
from .errors import DataError

# Fixed, because the last bits of a result depend on how many were computed together.
IMAGES_TOGETHER = 16
CAPTIONS_TOGETHER = 64


@dataclass(frozen=True)
class Rows:
    """What a block is made of. Shape: images (n, C, H, W), uint8; labels (n,); captions of each row."""

    images: Tensor | None
    labels: Tensor | None
    captions: Sequence[Captions] | None

    def __len__(self) -> int:
        column = next(column for column in (self.images, self.labels, self.captions) if column is not None)
        return len(column)


def ignore(done: float) -> None:
    """A report that nobody reads."""


class BlockEncoder:
    """The encoders that a recipe needs, on this process's device."""

    def __init__(self, text: TextConfig | None, latents: LatentConfig | None, rank: int = 0) -> None:
        device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
        self.text = None if text is None else TextEncoder(text, device)
        self.latents = None if latents is None else LatentEncoder(latents, device)

    def encode(self, rows: Rows, report: Callable[[float], None] = ignore) -> dict[str, Tensor]:
        """The tensors of a block of n rows; `report` is told how much of it is done, between 0 and 1.

        Shape: moments (n, 2·C, h, w), float32, or images (n, C, H, W), uint8; labels (n,); and for the m captions of
        all rows text (m, L, D), float16, starts (n + 1,), which says where a row's captions begin, and keys (n,), by
        which they are known again. Beside images, captions are kept as words: see `pack`.
        """
        tensors: dict[str, Tensor] = {}
        if rows.labels is not None:
            tensors["labels"] = rows.labels
        if rows.images is not None and self.latents is None:
            words = {} if rows.captions is None else pack(rows.captions)
            return {"images": rows.images, **tensors, **words}
        if rows.images is not None:
            tensors["moments"] = self.moments(rows.images, report)
        if rows.captions is not None:
            tensors["starts"] = torch.tensor([0, *accumulate(map(len, rows.captions))])
            tensors["keys"] = torch.tensor([key_of(several) for several in rows.captions], dtype=torch.int64)
            # Images take longer: where there are any, it is they that were reported.
            progress = ignore if rows.images is not None else report
            tensors["text"] = self.features(list(chain.from_iterable(rows.captions)), progress)
        return tensors

    def moments(self, images: Tensor, report: Callable[[float], None] = ignore) -> Tensor:
        """Mean and standard deviation of each latent. Shape: (n, 3, H, W), uint8 → (n, 2·C, h, w)."""
        assert self.latents is not None
        config = self.latents.config
        moments = torch.empty(len(images), 2 * config.channels, *(side // config.factor for side in images.shape[2:]))
        for together in stretches(len(images), IMAGES_TOGETHER):
            moments[together] = self.latents.encode(images[together]).cpu()
            report(together.stop / len(images))
        return moments

    def features(self, captions: Sequence[str], report: Callable[[float], None] = ignore) -> Tensor:
        """Features of captions in half the bytes; what is lost is a part in 2000. Shape: (len(captions), L, D)."""
        assert self.text is not None
        features = torch.empty(len(captions), *self.text.shape, dtype=torch.float16)
        # Captions of about the same length together, because padding takes time too.
        order = sorted(range(len(captions)), key=lambda number: len(captions[number]))
        for together in stretches(len(captions), CAPTIONS_TOGETHER):
            some = order[together]
            features[some] = self.text.encode([captions[number] for number in some]).cpu().half()
            report(together.stop / len(captions))
        if not features.isfinite().all():
            raise DataError(f"text.encoder: {self.text.config.encoder!r} gives features that 16 bits cannot hold")
        return features


def stretches(count: int, size: int) -> Iterator[slice]:
    """
    >>> list(stretches(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def pack(captions: Sequence[Captions]) -> dict[str, Tensor]:
    """Words as tensors: the bytes of all rows, and where those of each row begin. Shape: (bytes,), uint8, (n + 1,)."""
    rows = [json.dumps(several).encode() for several in captions]
    content = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return {"captions": content, "starts": torch.tensor([0, *accumulate(map(len, rows))])}


def unpack(block: Mapping[str, Tensor], row: int) -> Captions:
    """The captions of a row that were packed.

    >>> unpack(pack([("a dog",), ("a cat", "an animal")]), 1)
    ('a cat', 'an animal')
    """
    start, stop = block["starts"][row : row + 2].tolist()
    return tuple(json.loads(block["captions"][start:stop].numpy().tobytes()))


def key_of(captions: Captions) -> int:
    """A hash by which the captions of a row are known again; signed, in 8 bytes."""
    digest = hashlib.blake2b(json.dumps(captions).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
