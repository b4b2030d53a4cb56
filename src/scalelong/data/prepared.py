"""Reading what was prepared: images, latents and text features from memory-mapped blocks, which need no memory.

A folder is compared with the recipe by its fingerprint: what its files depend on, by dotted name.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ..utils.atomic import Damaged
from ..utils.blocks import BlockFolder, Entry, Fingerprint
from ..utils.process import keyed_generator
from ..utils.tensors import import_safetensors
from .batches import ImageSet, Picked, caption_of
from .config import DataConfig, DataError, LatentConfig, TextConfig
from .decode import Part, open_parts, open_picture, spread
from .encoders import fingerprint_of, latents_from, locate
from .sources import Captions, short_hash

PARTS = ("train", "validation")
# The block with the features of the empty caption.
EMPTY = "empty"
SAMPLED_PICTURES = 16
AGAIN = "run `scalelong prepare` again"
# Hashing takes a second or two for each GB; of larger sets only the sizes are compared, and `prepare` does the rest.
HASHED_BYTES = 4 << 30

# A hash says more than the name beside it: the same contents may lie somewhere else.
HASH_OF = {"data.source": "data.hash", "text.encoder": "text.hash", "latents.autoencoder": "latents.hash"}
# What cannot always be known where the data is read.
UNSURE = ("data.source", "shard_rows", *HASH_OF.values(), *(f"data.{part}_rows" for part in PARTS))


@dataclass(frozen=True)
class PreparedData:
    """The examples to train on, those for validation, and the feature of the empty caption. Shape: (L, D)."""

    train: PreparedSet
    validation: PreparedSet
    empty_text: Tensor | None = None


def open_prepared(
    folder: str | Path,
    data: DataConfig,
    text: TextConfig | None,
    latents: LatentConfig | None,
    *,
    images: Sequence[ImageSet | PreparedSet] | None = None,
) -> PreparedData:
    """What `prepare` made for these blocks of a recipe; raises DataError if it was made for others, or is damaged.

    Without latents, `images` are those that the features belong to, to train on and for validation. An encoder that is
    not here is compared by its name, and so is a source on the hub; with latents neither is needed.
    """
    now = asked(data, text, latents)
    now |= encoder_hashes(now, download=False)
    if latents is None:
        # The captions of the images that were given are compared instead.
        del now["data.source"]
    elif data.source.startswith("sklearn:") or Path(data.source).expanduser().exists():
        now |= contents_of(parts_to_encode(data, text, True), pictures=True)
    return read_folder(BlockFolder(folder), now, scale=latents and latents.scale, images=images)


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


def asked(data: DataConfig, text: TextConfig | None, latents: LatentConfig | None) -> Fingerprint:
    """The keys of a recipe that change what is prepared; latents are stored unscaled, so the scale is none of them."""
    keys = ["source", "train_split", "validation_split", "validation_count"]
    # Only where there is one, so that folders keep the names they had before there were any.
    keys += [] if data.config is None else ["config"]
    keys += [] if text is None else ["caption_column"]
    keys += [] if latents is None else ["image_column", "label_column", "image_size", "channels", "fit"]
    fingerprint: Fingerprint = {f"data.{key}": getattr(data, key) for key in keys}
    fingerprint |= {} if text is None else {"text.encoder": text.encoder, "text.max_length": text.max_length}
    return fingerprint | ({} if latents is None else {"latents.autoencoder": latents.autoencoder})


def encoder_hashes(now: Fingerprint, *, download: bool) -> Fingerprint:
    """Those of a recipe's encoders; None for one that is not here, unless it is to be downloaded."""
    hashes: Fingerprint = {}
    for key in [key for key in ("text.encoder", "latents.autoencoder") if key in now]:
        try:
            hashes[HASH_OF[key]] = fingerprint_of(locate(now[key], key, download=download))
        except DataError:
            if download:
                raise
            # Training can do without it.
            hashes[HASH_OF[key]] = None
    return hashes


def parts_to_encode(data: DataConfig, text: TextConfig | None, latents: bool, classes: int | None = None) -> list[Part]:
    """The rows to train on and those for validation, with the columns that are encoded or kept beside it."""
    if text is not None and data.caption_column is None:
        raise DataError("data.caption_column: the recipe has a text encoder, but no column with captions to encode")
    unused = {} if latents else {"label_column": None}
    unused |= {} if text is not None else {"caption_column": None}
    return open_parts(data.model_copy(update=unused), classes)


def contents_of(parts: Sequence[Part], *, pictures: bool) -> Fingerprint:
    """How many rows there are, and a hash of all their labels and captions and of a few pictures."""
    counts: Fingerprint = {f"data.{name}_rows": len(part) for name, part in zip(PARTS, parts, strict=True)}
    digest = hashlib.sha256()
    for part in parts:
        labels = None if part.labels is None else part.labels.tolist()
        digest.update(json.dumps([list(part.rows), labels, part.captions]).encode())
        sampled = [part.rows[place] for place in spread(len(part), SAMPLED_PICTURES)] if pictures else []
        for row in part.table.rows(sampled):
            try:
                with open_picture(row[part.config.image_column]) as picture:
                    digest.update(f"{picture.mode}{picture.size}".encode() + picture.tobytes())
            except (OSError, ValueError, SyntaxError):
                digest.update(b"broken")
    return counts | {"data.hash": digest.hexdigest()[:32]}


def check_fingerprint(folder: Path, before: Fingerprint, now: Fingerprint, advice: str) -> None:
    """Raise if a folder was prepared for something else; what is not known now is not compared.

    >>> check_fingerprint(Path("old"), {"data.fit": "crop"}, {"data.fit": "pad"}, "remove it")
    Traceback (most recent call last):
    scalelong.data.config.DataError: old was prepared for data.fit 'crop', not 'pad': remove it
    """
    other = {hashed: f"other files of {name}" for name, hashed in HASH_OF.items()}
    other["data.hash"] = "other images or captions in data.source"
    for key in {**before, **now}:
        unknown = key in UNSURE and now.get(key) is None
        if unknown or now.get(HASH_OF.get(key, "")) is not None or before.get(key) == now.get(key):
            continue
        differs = other.get(key) or f"{key} {before.get(key)!r}, not {now.get(key)!r}"
        raise DataError(f"{folder} was prepared for {differs}: {advice}")
