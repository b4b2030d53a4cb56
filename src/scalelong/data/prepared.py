"""Reading prepared data: latents and text features from memory-mapped shards, so that large sets need no memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ..utils.atomic import Damaged
from ..utils.blocks import BlockFolder, Entry
from ..utils.rng import keyed_generator
from ..utils.tensors import import_safetensors
from .config import DataConfig
from .config_encoders import LatentConfig, TextConfig
from .encoders import draw_latents
from .errors import DataError
from .examples import Picked, caption_of
from .facts import EMPTY, PARTS, Facts, asked, check_facts, encoder_hashes, known_source_facts, short_hash
from .images import ImageData, ImageSet
from .shard_content import key_of

AGAIN = "run `scalelong prepare` again"
# Hashing takes a second or two for each GB; of larger sets only the sizes are compared, and `prepare` does the rest.
HASHED_BYTES = 4 << 30


@dataclass(frozen=True)
class PreparedData:
    """The examples to train on, those held out, and the feature of the empty caption. Shape: empty_text (L, D)."""

    train: PreparedSet
    validation: PreparedSet
    empty_text: Tensor | None


def open_prepared(
    folder: str | Path,
    data: DataConfig,
    text: TextConfig | None,
    latents: LatentConfig | None,
    *,
    images: ImageData | None = None,
) -> PreparedData:
    """What `prepare` made for these blocks of a recipe; raises DataError if it was made for others, or is damaged.

    Without latents, `images` are those that the features belong to. An encoder that is not here is compared by its
    name, and so is a source on the hub; with latents neither is needed.
    """
    now = asked(data, text, latents) | encoder_hashes(text, latents, download=False)
    if latents is None:
        # The captions of the images that were given are compared instead.
        del now["data.source"]
    else:
        now |= known_source_facts(data, text)
    store = BlockFolder(folder)
    entries = checked_entries(store, now)
    scale = None if latents is None else latents.scale
    pixels = (None, None) if images is None else (images.train, images.validation)
    train, validation = (
        PreparedSet(Shards(store, entries, part), scale=scale, images=own)
        for part, own in zip(PARTS, pixels, strict=True)
    )
    return PreparedData(train, validation, None if text is None else mapped(store.shard(EMPTY))["text"][0].float())


def checked_entries(store: BlockFolder, now: Facts) -> dict[str, Entry]:
    """The files of a complete folder, made for these facts and as they were written."""
    index = store.index()
    if index is None:
        raise DataError(f"there is no prepared data in {store.path}: run `scalelong prepare` first, with this recipe")
    facts = index.fingerprint
    compared = facts.keys() - {"shard_rows", "data.source"} | now.keys()
    check_facts(store.path, {key: fact for key, fact in facts.items() if key in compared}, now, AGAIN)
    if index.entries is None:
        raise DataError(f"{store.path} is not finished: {AGAIN}, it goes on where it was stopped")
    small = sum(entry.bytes for entry in index.entries.values()) <= HASHED_BYTES
    for entry in index.entries.values():
        try:
            store.verify(entry, hashed=small)
        except Damaged as damage:
            raise DataError(f"{store.path} is damaged, {damage}: {AGAIN}, it makes only that anew") from damage
    return dict(index.entries)


def prepared_folder(name: str, data: DataConfig, text: TextConfig | None, latents: LatentConfig | None) -> Path:
    """Where a recipe's prepared data lies: `data.prepared`, else `prepared/<name>-<hash of what it depends on>`."""
    if data.prepared is not None:
        return Path(data.prepared).expanduser()
    return Path("prepared") / f"{name}-{short_hash(asked(data, text, latents))}"


class Shards:
    """The rows of one part, numbered through all of its shards, each of which is mapped when it is first read."""

    def __init__(self, store: BlockFolder, entries: dict[str, Entry], part: str) -> None:
        names = sorted(name for name in entries if name.startswith(f"{part}-"))
        self.paths = [store.shard(name) for name in names]
        self.ends = list(accumulate(entries[name].rows for name in names))
        self._mapped: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def find(self, row: int) -> tuple[dict[str, Tensor], int]:
        """The shard of a row, and its place there."""
        number = bisect_right(self.ends, row)
        return self.shard(number), row - (self.ends[number - 1] if number else 0)

    def shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._mapped:
            self._mapped[number] = mapped(self.paths[number])
        return self._mapped[number]

    def column(self, name: str) -> Tensor:
        """One small tensor of all rows."""
        return torch.cat([self.shard(number)[name] for number in range(len(self.paths))])


class PreparedSet:
    """Examples from shards; images are latents, drawn anew at each step, or those of a set in memory.

    z = (mean + std·noise)·scale, where the noise is a function of the example's seed.
    """

    def __init__(self, shards: Shards, *, scale: float | None, images: ImageSet | None = None) -> None:
        if (scale is None) == (images is None):
            raise ValueError("latents have a scale; without latents there are images, and not both")
        self.shards, self.scale, self.images = shards, scale, images
        self.rows: Sequence[int] = range(len(shards)) if images is None else match(images, shards)

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, indices: Tensor, seeds: Tensor) -> Picked:
        """Some examples. Shape: (B,), (B,) → latents (B, C, h, w) in float32, or images in uint8; text (B, L, D)."""
        found = [self.shards.find(self.rows[index]) for index in indices.tolist()]
        text = self._text(found, seeds.tolist())
        if self.images is not None:
            picked = self.images.pick(indices, seeds)
            return Picked(picked.images, picked.labels, text, picked.captions)
        labels = [shard["labels"][place] for shard, place in found if "labels" in shard]
        return Picked(self._latents(found, seeds.tolist()), torch.stack(labels) if labels else None, text)

    def _latents(self, found: list[tuple[dict[str, Tensor], int]], seeds: list[int]) -> Tensor:
        assert self.scale is not None
        moments = torch.stack([shard["moments"][place] for shard, place in found])
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        noise = torch.stack([torch.randn(shape, generator=keyed_generator(seed, "latent", 0)) for seed in seeds])
        return draw_latents(moments, noise, self.scale)

    def _text(self, found: list[tuple[dict[str, Tensor], int]], seeds: list[int]) -> Tensor | None:
        """The features of one caption of each example."""
        features = []
        for (shard, place), seed in zip(found, seeds, strict=True):
            if "text" not in shard:
                return None
            start, stop = shard["starts"][place : place + 2].tolist()
            features.append(shard["text"][start + caption_of(seed, stop - start)])
        return torch.stack(features).float()


def match(images: ImageSet, shards: Shards) -> list[int]:
    """The row of each image's captions; images that could not be read have rows, but are not in the set."""
    if images.captions is None:
        raise DataError("data.caption_column: the images have no captions, but features of captions were prepared")
    keys = enumerate(shards.column("keys").tolist())
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
