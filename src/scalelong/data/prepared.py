"""Reading what was prepared: images, latents and text features from memory-mapped blocks, which need no memory.

A folder is compared with the recipe by its fingerprint: what its files depend on, by dotted name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ..utils.atomic import Damaged, import_safetensors
from ..utils.block_folder import BlockFolder, Entry, Fingerprint
from ..utils.runtime import keyed_generator
from .batches import ImageSet, Picked, caption_of
from .config import DataConfig, DataError, LatentConfig, TextConfig
from .encoders import latents_from
from .prepare import EMPTY, PARTS, Job, asked, check_fingerprint, contents_of, encoder_hashes, key_of, unpack
from .sources import Captions, short_hash

AGAIN = "run `scalelong prepare` again"
# Hashing takes a second or two for each GB; of larger sets only the sizes are compared, and `prepare` does the rest.
HASHED_BYTES = 4 << 30


@dataclass(frozen=True)
class PreparedData:
    """The examples to train on, those for validation, and the feature of the empty caption. Shape: (L, D)."""

    train: PreparedSet
    validation: PreparedSet
    empty_text: Tensor | None = None


def open_prepared(job: Job, *, images: Sequence[ImageSet | PreparedSet] | None = None) -> PreparedData:
    """What `prepare` made of these blocks of a recipe; raises DataError if it was made of others, or is damaged.

    Without latents, `images` are those that the features belong to, to train on and for validation. An encoder that is
    not here is compared by its name, and so is a source on the hub; with latents neither is needed.
    """
    now = asked(job.data, job.text, job.latents)
    now |= encoder_hashes(now, download=False)
    source = job.data.source
    if job.latents is None:
        # The captions of the images that were given are compared instead.
        del now["data.source"]
    elif source.startswith("sklearn:") or Path(source).expanduser().exists():
        now |= contents_of(job.open(), pictures=True)
    return read_folder(BlockFolder(job.folder), now, scale=job.latents and job.latents.scale, images=images)


def read_folder(
    store: BlockFolder,
    now: Fingerprint,
    *,
    scale: float | None = None,
    images: Sequence[ImageSet | PreparedSet] | None = None,
) -> PreparedData:
    """Both parts of a complete folder that was made for this fingerprint, and is as it was written."""
    index = store.index()
    if index is None:
        raise DataError(f"there is no prepared data in {store.path}: run `scalelong prepare` first, with this recipe")
    check_fingerprint(store.path, index.fingerprint, now, AGAIN)
    if index.entries is None:
        raise DataError(f"{store.path} is not finished: {AGAIN}, it resumes where it was stopped")
    small = sum(entry.bytes for entry in index.entries.values()) <= HASHED_BYTES
    try:
        for entry in index.entries.values():
            store.verify(entry, hashed=small)
    except Damaged as damage:
        raise DataError(f"{store.path} is damaged, {damage}: {AGAIN}, it makes only that anew") from damage
    train, validation = (Blocks(store, index.entries, part) for part in PARTS)
    own, others = images or (None, None)
    empty = mapped(store.shard(EMPTY))["text"][0].float() if EMPTY in index.entries else None
    return PreparedData(PreparedSet(train, scale, own), PreparedSet(validation, scale, others), empty)


def prepared_folder(name: str, data: DataConfig, text: TextConfig | None, latents: LatentConfig | None) -> Path:
    """Where a recipe's prepared data lies: `data.prepared`, else `prepared/<name>-<hash of what it depends on>`."""
    if data.prepared is not None:
        return Path(data.prepared).expanduser()
    return Path("prepared") / f"{name}-{short_hash(asked(data, text, latents))}"


# A block, and a row of it.
Place = tuple[Mapping[str, Tensor], int]


class Blocks:
    """The rows of one part, numbered through all of its blocks, each of which is mapped when it is first read."""

    def __init__(self, store: BlockFolder, entries: Mapping[str, Entry], part: str) -> None:
        names = sorted(name for name in entries if name.startswith(f"{part}-"))
        self.paths = [store.shard(name) for name in names]
        self.ends = list(accumulate(entries[name].rows for name in names))
        self._mapped: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def find(self, row: int) -> Place:
        number = bisect_right(self.ends, row)
        return self.block(number), row - (self.ends[number - 1] if number else 0)

    def block(self, number: int) -> dict[str, Tensor]:
        if number not in self._mapped:
            self._mapped[number] = mapped(self.paths[number])
        return self._mapped[number]

    def columns(self, name: str) -> Iterator[Tensor]:
        """One small tensor of each block that has it."""
        blocks = map(self.block, range(len(self.paths)))
        return (block[name] for block in blocks if name in block)


class PreparedSet:
    """Examples from blocks: images, or latents, random anew at each step; with `images`, text features of those.

    z = (mean + std·noise)·scale, where the noise is a function of the example's seed.
    """

    def __init__(self, blocks: Blocks, scale: float | None, images: ImageSet | PreparedSet | None) -> None:
        self.blocks, self.scale, self.images = blocks, scale, images
        self.rows: Sequence[int] = range(len(blocks)) if images is None else match(images, blocks)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def captions(self) -> Iterable[Captions] | None:
        """The captions of each image, if they are kept as words."""
        if next(self.blocks.columns("captions"), None) is None:
            return None
        return (unpack(*self.blocks.find(row)) for row in self.rows)

    def pick(self, indices: Tensor, seeds: Tensor) -> Picked:
        """Some examples. Shape: (B,), (B,) → latents (B, C, h, w) in float32, or images in uint8; text (B, L, D)."""
        found = [self.blocks.find(self.rows[index]) for index in indices.tolist()]
        seed_of = seeds.tolist()
        if self.images is not None:
            return replace(self.images.pick(indices, seeds), text=text_of(found, seed_of))
        images = torch.stack([block["images" if self.scale is None else "moments"][place] for block, place in found])
        if self.scale is not None:
            shape = (images.shape[1] // 2, *images.shape[2:])
            noise = [torch.randn(shape, generator=keyed_generator(seed, "latent", 0)) for seed in seed_of]
            images = latents_from(images, torch.stack(noise), self.scale)
        labels = [block["labels"][place] for block, place in found if "labels" in block]
        stacked = torch.stack(labels) if labels else None
        return Picked(images, stacked, text_of(found, seed_of), captions_of(found, seed_of))


def text_of(found: Sequence[Place], seeds: list[int]) -> Tensor | None:
    """The features of one caption of each example. Shape: (B, L, D)."""
    features = []
    for (block, place), seed in zip(found, seeds, strict=True):
        if "text" not in block:
            return None
        start, stop = block["starts"][place : place + 2].tolist()
        features.append(block["text"][start + caption_of(seed, stop - start)])
    return torch.stack(features).float()


def captions_of(found: Sequence[Place], seeds: list[int]) -> tuple[str, ...] | None:
    """One caption of each example, if they are kept as words."""
    several = [unpack(block, place) for block, place in found if "captions" in block]
    chosen = tuple(some[caption_of(seed, len(some))] for some, seed in zip(several, seeds, strict=False))
    return chosen or None


def match(images: ImageSet | PreparedSet, blocks: Blocks) -> list[int]:
    """The row of each image's captions; images that could not be read have rows, but are not in the set."""
    if images.captions is None:
        raise DataError("data.caption_column: the images have no captions, but features of captions were prepared")
    keys = enumerate(key for column in blocks.columns("keys") for key in column.tolist())
    rows = []
    for captions in images.captions:
        key = key_of(captions)
        row = next((row for row, found in keys if found == key), None)
        if row is None:
            raise DataError(f"the captions are not those that features were prepared of: {AGAIN}")
        rows.append(row)
    return rows


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, which the system reads when, and forgets once, it likes."""
    with import_safetensors().safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
