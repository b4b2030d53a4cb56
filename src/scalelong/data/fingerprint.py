"""What kept data depends on: the keys of the recipe, the contents of the source, and the encoders' weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import DataConfig, LatentConfig, TextConfig
from .dataset import Part, open_parts, spread
from .decode import open_picture
from .errors import DataError
from .pretrained import fingerprint_of, locate
from .sources import source_hash

# By dotted name; None = not known here.
Fingerprint = dict[str, str | int | None]

PARTS = ("train", "validation")
# The block with the features of the empty caption.
EMPTY = "empty"
SAMPLED_PICTURES = 16

# A hash says more than the name beside it: the same contents may lie somewhere else.
HASH_OF = {"data.source": "data.hash", "text.encoder": "text.hash", "latents.autoencoder": "latents.hash"}
CONTENTS = {
    "data.hash": "other images or captions in data.source",
    "text.hash": "other files of text.encoder",
    "latents.hash": "other files of latents.autoencoder",
}


def images_fingerprint(data: DataConfig) -> Fingerprint:
    """What the decoded images of a recipe depend on; nothing is read for it but the names of the files."""
    keys = ["config", "train_split", "validation_split", "validation_count", "image_size", "channels", "fit"]
    keys += ["image_column", "label_column", "caption_column"]
    path = Path(data.source).expanduser()
    # Relative to where the command was given, of which there are many.
    source = str(path.absolute()) if path.exists() or "*" in data.source else data.source
    fingerprint: Fingerprint = {"data.source": source, "data.files": source_hash(data.source, data.config)}
    return fingerprint | {f"data.{key}": getattr(data, key) for key in keys}


def asked(data: DataConfig, text: TextConfig | None, latents: LatentConfig | None) -> Fingerprint:
    """The keys of a recipe that change what is prepared; latents are stored unscaled, so the scale is none of them."""
    keys = ["source", "train_split", "validation_split", "validation_count"]
    # Only where there is one, so that folders keep the names they had before there were any.
    keys += [] if data.config is None else ["config"]
    if text is not None:
        keys += ["caption_column"]
    if latents is not None:
        keys += ["image_column", "label_column", "image_size", "channels", "fit"]
    fingerprint: Fingerprint = {f"data.{key}": getattr(data, key) for key in keys}
    if text is not None:
        fingerprint |= {"text.encoder": text.encoder, "text.max_length": text.max_length}
    if latents is not None:
        fingerprint |= {"latents.autoencoder": latents.autoencoder}
    return fingerprint


def encoder_hashes(text: TextConfig | None, latents: LatentConfig | None, *, download: bool) -> Fingerprint:
    """None for an encoder that is not here, unless it is to be downloaded: training can do without it."""
    named = {} if text is None else {"text.encoder": text.encoder}
    named |= {} if latents is None else {"latents.autoencoder": latents.autoencoder}
    hashes: Fingerprint = {}
    for key, name in named.items():
        try:
            hashes[HASH_OF[key]] = fingerprint_of(locate(name, key, download=download))
        except DataError:
            if download:
                raise
            hashes[HASH_OF[key]] = None
    return hashes


def known_contents(data: DataConfig, text: TextConfig | None) -> Fingerprint:
    """The contents of the source of latents, as far as they can be had without a download."""
    if not (data.source.startswith("sklearn:") or Path(data.source).expanduser().exists()):
        return {}
    return contents_of(parts_to_encode(data, text, latents=True), pictures=True)


def parts_to_encode(
    data: DataConfig, text: TextConfig | None, *, latents: bool, classes: int | None = None
) -> list[Part]:
    """The rows to train on and those for validation, with the columns that are encoded or kept beside it."""
    if text is not None and data.caption_column is None:
        raise DataError("data.caption_column: the recipe has a text encoder, but no column with captions to encode")
    unused = {} if latents else {"label_column": None}
    unused |= {} if text is not None else {"caption_column": None}
    return open_parts(data.model_copy(update=unused), classes)


def contents_of(parts: Sequence[Part], *, pictures: bool) -> Fingerprint:
    """How many rows there are, and a hash of all their labels and captions and of a few pictures."""
    counts: Fingerprint = {f"data.{name}_rows": len(part.rows) for name, part in zip(PARTS, parts, strict=True)}
    digest = hashlib.sha256()
    for part in parts:
        annotations = part.plan().annotations
        labels = None if annotations.labels is None else annotations.labels.tolist()
        digest.update(json.dumps([list(part.rows), labels, annotations.captions]).encode())
        sampled = [part.rows[place] for place in spread(len(part.rows), SAMPLED_PICTURES)] if pictures else []
        for row in part.table.rows(sampled):
            digest.update(picture_bytes(row[part.config.image_column]))
    return counts | {"data.hash": digest.hexdigest()[:32]}


def picture_bytes(raw: Any) -> bytes:
    try:
        with open_picture(raw) as picture:
            return f"{picture.mode}{picture.size}".encode() + picture.tobytes()
    except (OSError, ValueError, SyntaxError):
        return b"broken"


def difference(before: Fingerprint, now: Fingerprint) -> str | None:
    """The first thing that differs, in words; what is not known now is not compared.

    >>> difference({"data.fit": "crop"}, {"data.fit": "pad"})
    "data.fit 'crop', not 'pad'"
    """
    unknown = {key for key in (*HASH_OF.values(), *(f"data.{part}_rows" for part in PARTS)) if now.get(key) is None}
    skipped = unknown | {name for name, key in HASH_OF.items() if key not in unknown}
    for key in {**before, **now}:
        if key not in skipped and before.get(key) != now.get(key):
            return CONTENTS.get(key) or f"{key} {before.get(key)!r}, not {now.get(key)!r}"
    return None


def check_fingerprint(folder: Path, before: Fingerprint, now: Fingerprint, advice: str) -> None:
    """Raise if a folder was prepared for something else."""
    differs = difference(before, now)
    if differs is not None:
        raise DataError(f"{folder} was prepared for {differs}: {advice}")
