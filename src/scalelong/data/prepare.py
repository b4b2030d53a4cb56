"""The job behind `scalelong prepare`: what is computed once, and kept in blocks of rows on the disk.

For a recipe with text or latents these are the features and latents, else the decoded images themselves. What a block
holds is a function of the recipe and the data alone: it is made by itself, in batches of fixed sizes and by one thread.
So neither kills nor the number of processes can be seen in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, count
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..utils.atomic import free_space, human_size
from ..utils.blocks import BlockFolder, Entry, Fingerprint
from ..utils.blocks import Progress as BlockProgress
from ..utils.process import SINGLE, Rank
from .batches import ImageSet
from .config import DataConfig, DataError, LatentConfig, TextConfig
from .decode import BrokenImages, Part, Progress, open_parts
from .encoders import LatentEncoder, TextEncoder, repeatable
from .prepared import (
    EMPTY,
    HASH_OF,
    PARTS,
    asked,
    check_fingerprint,
    contents_of,
    encoder_hashes,
    key_of,
    pack,
    parts_to_encode,
)
from .sources import Captions, images_fingerprint

ENCODED_ROWS = 256
# Decoded images take little time each, and a file for a few of them would be small.
IMAGES_BYTES = 64 << 20
# Fixed, because the last bits of a result depend on how many were computed together.
IMAGES_TOGETHER = 16
CAPTIONS_TOGETHER = 64

# Called with how much of a block is done, between 0 and 1.
Report = Callable[[float], None]


@dataclass(frozen=True)
class Job:
    """What is to be prepared, and where; without text and latents it is the images."""

    data: DataConfig
    text: TextConfig | None
    latents: LatentConfig | None
    folder: Path
    classes: int | None = None
    block_rows: int | None = None

    @property
    def images_only(self) -> bool:
        return self.text is None and self.latents is None

    def check(self) -> None:
        """Raise where a recipe cannot be prepared, before anything is opened."""
        if self.latents is None:
            return
        if self.data.flip:
            raise DataError("data.flip: latents are computed once, of images that are not mirrored; set it to false")
        if self.data.channels != 3:
            raise DataError(f"data.channels: an autoencoder takes colour, so 3, not {self.data.channels}")
        if self.data.image_size % self.latents.factor:
            raise DataError(f"data.image_size: must be a multiple of latents.factor ({self.latents.factor})")

    def open(self) -> list[Part]:
        """The rows of the source, which are checked."""
        if self.images_only:
            return open_parts(self.data, self.classes)
        return parts_to_encode(self.data, self.text, self.latents is not None, self.classes)

    def rows_together(self) -> int:
        """How many rows a block has."""
        usual = max(1, IMAGES_BYTES // prod(self.data.image_shape)) if self.images_only else ENCODED_ROWS
        return usual if self.block_rows is None else self.block_rows

    def fingerprint(self, parts: Sequence[Part]) -> Fingerprint:
        """What the files depend on."""
        if self.images_only:
            fingerprint = images_fingerprint(self.data)
        else:
            fingerprint = asked(self.data, self.text, self.latents)
            fingerprint |= contents_of(parts, pictures=self.latents is not None)
            fingerprint |= encoder_hashes(fingerprint, download=True)
        return fingerprint | {"shard_rows": self.rows_together()}


@dataclass(frozen=True)
class Prepared:
    """What is in the folder in the end: rows by part, and the images that could not be read."""

    folder: Path
    rows: dict[str, int]
    bytes: int
    broken: BrokenImages


def prepare(
    job: Job, rank: Rank = SINGLE, *, progress: Progress | None = None, parts: list[Part] | None = None
) -> Prepared | None:
    """Prepare what is not prepared yet; finished blocks are verified and kept. `parts` saves opening the source.

    Of several processes the first waits for the rest and returns what they made together; the others return None.
    """
    job.check()
    parts = parts or job.open()
    fingerprint, folder = job.fingerprint(parts), PreparedFolder(job, parts, rank)
    if job.images_only:
        check_space(job, folder.total)
    before = folder.index()
    if before is not None:
        check_fingerprint(job.folder, before.fingerprint, fingerprint, "choose another --out, or remove it first")
    blocks = {name: range(len(part)) for name, part in folder.blocks.items()}
    show = progress or (lambda done, total: None)
    whole: BlockProgress = lambda done, total: show(round(done), total)  # noqa: E731
    with repeatable():
        folder.fill(fingerprint, blocks, folder.make, rank, whole, ignore=HASH_OF)
    if rank.index:
        folder.tidy(list(blocks)[rank.index :: rank.world])
        return None
    rows = {part: sum(entry.rows for name, entry in folder.entries.items() if name.startswith(part)) for part in PARTS}
    size = sum(entry.bytes for entry in folder.entries.values())
    return Prepared(job.folder, rows, size, folder.broken(folder.entries.values()))


class PreparedFolder(BlockFolder):
    """The folder of a job while its blocks are made; it becomes complete only if enough images can be read."""

    def __init__(self, job: Job, parts: Sequence[Part], rank: Rank) -> None:
        super().__init__(job.folder)
        self.job, self.rank, self.total = job, rank, sum(map(len, parts))
        self.blocks = {} if job.text is None else {EMPTY: parts[0].take(slice(0))}
        self.entries: Mapping[str, Entry] = {}
        size = job.rows_together()
        for name, part in zip(PARTS, parts, strict=True):
            for place, start in enumerate(range(0, len(part), size)):
                self.blocks[f"{name}-{place:05d}"] = part.take(slice(start, start + size))

    @cached_property
    def encoder(self) -> BlockEncoder:
        return BlockEncoder(self.job.text, self.job.latents, self.rank.index)

    def make(self, name: str, numbers: range, report: Report) -> None:
        """Make a block; where images are needed, those that cannot be read are left out and named in its entry."""
        part, job, done = self.blocks[name], self.job, count(1)
        broken, rows = BrokenImages(job.data.source), len(part)
        if name == EMPTY:
            tensors = {"text": self.encoder.features([""], report)}
        elif job.latents is None and job.text is not None:
            tensors = self.encoder.encode_captions(part.captions or (), report)
        else:
            # Decoding takes long where nothing is encoded; otherwise it is the encoding that is reported.
            images = part.decode(broken, (lambda: report(next(done) / len(part))) if job.images_only else lambda: None)
            if broken.found:
                self.broken([*self.other_entries(name), Entry({}, len(images), dict(broken.found))]).check(self.total)
            rows, tensors = len(images), self.encoder.encode(images, report)
        self.add(name, tensors, rows=rows, broken=dict(broken.found))

    def other_entries(self, name: str) -> list[Entry]:
        """Those of all other blocks that are finished, by whichever process."""
        index = self.index()
        others = [] if index is None else [self.entry(other, index) for other in self.blocks if other != name]
        return [entry for entry in others if entry is not None]

    def finish(self, fingerprint: Fingerprint, entries: Mapping[str, Entry]) -> None:
        self.broken(entries.values()).check(self.total)
        super().finish(fingerprint, entries)
        self.entries = entries

    def broken(self, entries: Iterable[Entry]) -> BrokenImages:
        """The images of some blocks that could not be read."""
        return BrokenImages(self.job.data.source, [item for entry in entries for item in entry.broken.items()])


class BlockEncoder:
    """The encoders that a recipe needs, on this process's device, and the form in which their results are kept."""

    def __init__(self, text: TextConfig | None, latents: LatentConfig | None, rank: int = 0) -> None:
        device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
        self.text = None if text is None else TextEncoder(text, device)
        self.latents = None if latents is None else LatentEncoder(latents, device)

    def encode(self, images: ImageSet, report: Report) -> dict[str, Tensor]:
        """The tensors of a block of n rows.

        Shape: labels (n,); images (n, C, H, W), uint8, beside which captions are kept as words: see `pack`; or moments
        (n, 2·C, h, w), float32, beside which they are kept as features.
        """
        tensors = {} if images.labels is None else {"labels": images.labels}
        if self.latents is None:
            return {"images": images.images, **tensors, **({} if images.captions is None else pack(images.captions))}
        tensors["moments"] = self.moments(images.images, report)
        # Images take longer than captions, which are not reported.
        return tensors if images.captions is None else tensors | self.encode_captions(images.captions, lambda _: None)

    def encode_captions(self, captions: Sequence[Captions], report: Report) -> dict[str, Tensor]:
        """The tensors of the captions of n rows, m together.

        Shape: text (m, L, D), float16; starts (n + 1,), which says where a row's captions begin; and keys (n,), by
        which they are known again.
        """
        starts = torch.tensor([0, *accumulate(map(len, captions))])
        keys = torch.tensor([key_of(several) for several in captions], dtype=torch.int64)
        return {"starts": starts, "keys": keys, "text": self.features(list(chain.from_iterable(captions)), report)}

    def moments(self, images: Tensor, report: Report) -> Tensor:
        """Mean and standard deviation of each latent. Shape: (n, 3, H, W), uint8 → (n, 2·C, h, w)."""
        assert self.latents is not None
        config = self.latents.config
        moments = torch.empty(len(images), 2 * config.channels, *(side // config.factor for side in images.shape[2:]))
        for start in range(0, len(images), IMAGES_TOGETHER):
            some = slice(start, start + IMAGES_TOGETHER)
            moments[some] = self.latents.encode(images[some]).cpu()
            report(min(some.stop / len(images), 1))
        return moments

    def features(self, captions: Sequence[str], report: Report) -> Tensor:
        """Features of captions in half the bytes; what is lost is a part in 2000. Shape: (len(captions), L, D)."""
        assert self.text is not None
        features = torch.empty(len(captions), *self.text.shape, dtype=torch.float16)
        # Captions of about the same length together, because padding takes time too.
        order = sorted(range(len(captions)), key=lambda number: len(captions[number]))
        for start in range(0, len(captions), CAPTIONS_TOGETHER):
            some = order[start : start + CAPTIONS_TOGETHER]
            features[some] = self.text.encode([captions[number] for number in some]).cpu().half()
            report((start + len(some)) / len(captions))
        if not features.isfinite().all():
            raise DataError(f"text.encoder: {self.text.config.encoder!r} gives features that 16 bits cannot hold")
        return features


def check_space(job: Job, rows: int) -> None:
    """Raise, before the first image is decoded, where the disk has no room for them all."""
    size = rows * prod(job.data.image_shape)
    there = sum(file.stat().st_size for file in job.folder.glob("*.safetensors"))
    free = free_space(job.folder)
    if free is not None and size - there > free:
        raise DataError(
            f"data.source: {rows} images take {human_size(size)} in the image cache, {job.folder}, but only "
            f"{human_size(free)} are free there. Free some space, let SCALELONG_CACHE name a folder on a larger disk, "
            "set a smaller data.image_size, or a larger data.memory_gb if there is enough memory"
        )
