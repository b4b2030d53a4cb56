"""The job behind `scalelong prepare`: what is computed once, and kept in blocks of rows on the disk.

For a recipe with text or latents these are the features and latents, else the decoded images themselves. What a block
holds is a function of the recipe and the data alone: it is made by itself, in batches of fixed sizes and by one thread.
So neither kills nor the number of processes can be seen in the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, count
from pathlib import Path

import torch
from torch import Tensor

from ..utils.atomic import free_space, human_size
from ..utils.block_folder import BlockFolder, Entry, Fingerprint
from ..utils.runtime import SINGLE, Rank
from ..utils.team import check_shared
from .batches import ImageSet
from .config import DataConfig, DataError, LatentConfig, TextConfig
from .decode import BrokenImages, Part, Progress, open_parts, open_picture, spread
from .encoders import LatentEncoder, Report, TextEncoder, fingerprint_of, locate, repeatable
from .sources import Captions, box_key, images_fingerprint

PARTS = ("train", "validation")
# The block with the features of the empty caption.
EMPTY = "empty"
ENCODED_ROWS = 256
# Decoded images take little time each, and a file for a few of them would be small.
IMAGES_BYTES = 64 << 20
SAMPLED_PICTURES = 16

# A hash says more than the name beside it: the same contents may lie somewhere else.
HASH_OF = {"data.source": "data.hash", "text.encoder": "text.hash", "latents.autoencoder": "latents.hash"}
# What cannot always be known where the data is read.
UNSURE = ("data.source", "shard_rows", *HASH_OF.values(), *(f"data.{part}_rows" for part in PARTS))


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
        if self.text is not None and self.data.caption_column is None:
            raise DataError("data.caption_column: the recipe has a text encoder, but no column with captions to encode")
        users = {"label_column": self.latents, "caption_column": self.text}
        unused = {} if self.images_only else {column: None for column, user in users.items() if user is None}
        return open_parts(self.data.model_copy(update=unused), self.classes)

    def rows_together(self) -> int:
        """How many rows a block has."""
        usual = (
            max(1, IMAGES_BYTES // (self.data.channels * self.data.image_size**2)) if self.images_only else ENCODED_ROWS
        )
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
    check_shared(rank, job.folder, "folder of prepared data")
    before = folder.index()
    if before is not None:
        check_fingerprint(job.folder, before.fingerprint, fingerprint, "choose another --out, or remove it first")
    blocks = {name: range(len(part)) for name, part in folder.blocks.items()}
    show = progress or (lambda done, total: None)
    with repeatable():
        shown = lambda done, total: show(round(done), total)  # noqa: E731
        folder.fill(fingerprint, blocks, folder.make, rank, shown, ignore=HASH_OF)
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
    def encoders(self) -> tuple[TextEncoder | None, LatentEncoder | None]:
        """Those that the recipe names, on this process's device."""
        text, latents = self.job.text, self.job.latents
        device = f"cuda:{self.rank.index % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
        return text and TextEncoder(text, device), latents and LatentEncoder(latents, device)

    def make(self, name: str, numbers: range, report: Report) -> None:
        """Make a block; where images are needed, those that cannot be read are left out and named in its entry."""
        (text, latents), part, broken = self.encoders, self.blocks[name], BrokenImages(self.job.data.source)
        if text is not None and name == EMPTY:
            rows, tensors = 0, {"text": text.encode_all([""], report)}
        elif text is not None and latents is None:
            rows, tensors = len(part), encode_captions(text, part.captions or (), report)
        else:
            done = count(1)
            # Decoding takes long where nothing is encoded; otherwise it is the encoding that is reported.
            images = part.decode(broken, lambda: report(next(done) / len(part)) if latents is None else None)
            if broken.found:
                self.check_broken(name, Entry({}, len(images), dict(broken.found)))
            rows, tensors = len(images), self.tensors_of(images, report)
        self.add(name, tensors, rows=rows, broken=dict(broken.found))

    def tensors_of(self, images: ImageSet, report: Report) -> dict[str, Tensor]:
        """The tensors of a block of n rows, whose captions are kept as words beside images, as features beside moments.

        Shape: labels (n,); images (n, C, H, W), uint8, or moments (n, 2·C, h, w), float32.
        """
        text, latents = self.encoders
        labels = {} if images.labels is None else {"labels": images.labels}
        if latents is None:
            return {"images": images.images, **labels, **({} if images.captions is None else pack(images.captions))}
        tensors = {"moments": latents.encode_all(images.images, report), **labels}
        # Images take longer than captions, which are not reported.
        return tensors if text is None else tensors | encode_captions(text, images.captions or (), lambda share: None)

    def check_broken(self, name: str, entry: Entry) -> None:
        """Raise if with this block too many images of all that are finished, by whichever process, are broken."""
        if (index := self.index()) is not None:
            others = [self.entry(other, index) for other in self.blocks if other != name]
            self.broken(filter(None, [*others, entry])).check(self.total)

    def finish(self, fingerprint: Fingerprint, entries: Mapping[str, Entry]) -> None:
        self.broken(entries.values()).check(self.total)
        super().finish(fingerprint, entries)
        self.entries = entries

    def broken(self, entries: Iterable[Entry]) -> BrokenImages:
        """The images of some blocks that could not be read."""
        return BrokenImages(self.job.data.source, [item for entry in entries for item in entry.broken.items()])


def check_space(job: Job, rows: int) -> None:
    """Raise, before the first image is decoded, where the disk has no room for them all."""
    size = rows * job.data.channels * job.data.image_size**2
    there = sum(file.stat().st_size for file in job.folder.glob("*.safetensors"))
    free = free_space(job.folder)
    if free is not None and size - there > free:
        raise DataError(
            f"data.source: {rows} images take {human_size(size)} in the image cache, {job.folder}, but only "
            f"{human_size(free)} are free there. Free some space, let SCALELONG_CACHE name a folder on a larger disk, "
            "set a smaller data.image_size, or a larger data.memory_gb if there is enough memory"
        )


def encode_captions(text: TextEncoder, captions: Sequence[Captions], report: Report) -> dict[str, Tensor]:
    """The tensors of the captions of n rows, m together.

    Shape: text (m, L, D), float16; starts (n + 1,), which says where a row's captions begin; and keys (n,), by which
    they are known again.
    """
    starts = torch.tensor([0, *accumulate(map(len, captions))])
    keys = torch.tensor([key_of(several) for several in captions], dtype=torch.int64)
    return {"starts": starts, "keys": keys, "text": text.encode_all(list(chain.from_iterable(captions)), report)}


def asked(data: DataConfig, text: TextConfig | None, latents: LatentConfig | None) -> Fingerprint:
    """The keys of a recipe that change what is prepared; latents are stored unscaled, so the scale is none of them."""
    keys = ["source", "train_split", "validation_split", "validation_count"]
    # Only where there is one, so that folders keep the names they had before there were any.
    keys += [] if data.config is None else ["config"]
    keys += [] if text is None else ["caption_column"]
    keys += [] if latents is None else ["image_column", "label_column", "image_size", "channels", "fit", *box_key(data)]
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


def key_of(captions: Captions) -> int:
    """A hash by which the captions of a row are known again; signed, in 8 bytes."""
    digest = hashlib.blake2b(json.dumps(captions).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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
