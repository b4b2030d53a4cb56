"""What prepared data depends on: the keys of the recipe, the contents of the source, and the encoders' weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .columns import narrow
from .config import DataConfig
from .config_encoders import LatentConfig, TextConfig
from .errors import DataError
from .images import Plan, choose_rows, plan_rows, spread
from .pixels import open_picture
from .pretrained import fingerprint_of, locate
from .tables import Table

# By dotted name; None = not known here.
Facts = dict[str, str | int | None]

PARTS = ("train", "validation")
EMPTY = "empty"
"""The block with the features of the empty caption."""
SAMPLED_PICTURES = 16

# A hash says more than the name beside it: the same contents may lie somewhere else.
HASH_OF = {"data.source": "data.hash", "text.encoder": "text.hash", "latents.autoencoder": "latents.hash"}
CONTENTS = {
    "data.hash": "other images or captions in data.source",
    "text.hash": "other files of text.encoder",
    "latents.hash": "other files of latents.autoencoder",
}


def asked(data: DataConfig, text: TextConfig | None, latents: LatentConfig | None) -> Facts:
    """The keys of a recipe that change what is prepared; latents are stored unscaled, so the scale is none of them."""
    keys = ["source", "train_split", "validation_split", "validation_count"]
    # Only where there is one, so that folders keep the names they had before there were any.
    keys += [] if data.config is None else ["config"]
    if text is not None:
        keys += ["caption_column"]
    if latents is not None:
        keys += ["image_column", "label_column", "image_size", "channels", "fit"]
    facts: Facts = {f"data.{key}": getattr(data, key) for key in keys}
    if text is not None:
        facts |= {"text.encoder": text.encoder, "text.max_length": text.max_length}
    if latents is not None:
        facts |= {"latents.autoencoder": latents.autoencoder}
    return facts


@dataclass(frozen=True)
class Part:
    """The rows of a table to train on, or those held out; `config` names the columns that are used."""

    table: Table
    rows: Sequence[int]
    config: DataConfig
    classes: int | None = None

    def plan(self, rows: Sequence[int] | None = None) -> Plan:
        """Some of the rows, else all; raises DataError where labels or captions cannot be used."""
        return plan_rows(self.table, self.rows if rows is None else rows, self.config, self.classes)


def found(parts: Sequence[Part], text: TextConfig | None, latents: LatentConfig | None) -> Facts:
    """What the keys turn out to stand for."""
    return source_facts(parts, pictures=latents is not None) | encoder_hashes(text, latents, download=True)


def encoder_hashes(text: TextConfig | None, latents: LatentConfig | None, *, download: bool) -> Facts:
    """None for an encoder that is not here, unless it is to be downloaded: training can do without it."""
    facts: Facts = {}
    if text is not None:
        facts["text.hash"] = encoder_hash(text.encoder, "text.encoder", download=download)
    if latents is not None:
        facts["latents.hash"] = encoder_hash(latents.autoencoder, "latents.autoencoder", download=download)
    return facts


def encoder_hash(name: str, key: str, *, download: bool) -> str | None:
    try:
        return fingerprint_of(locate(name, key, download=download))
    except DataError:
        if download:
            raise
        return None


def known_source_facts(data: DataConfig, text: TextConfig | None) -> Facts:
    """The contents of the source of latents, as far as they can be had without a download."""
    if not (data.source.startswith("sklearn:") or Path(data.source).expanduser().exists()):
        return {}
    return source_facts(choose_parts(data, text, latents=True), pictures=True)


def choose_parts(data: DataConfig, text: TextConfig | None, *, latents: bool, classes: int | None = None) -> list[Part]:
    """The rows to train on and those held out, with the columns that are used."""
    if text is not None and data.caption_column is None:
        raise DataError("data.caption_column: the recipe has a text encoder, but no column with captions to encode")
    unused = {} if latents else {"label_column": None}
    unused |= {} if text is not None else {"caption_column": None}
    used = data.model_copy(update=unused)
    return [Part(narrow(table, used), rows, used, classes) for table, rows in choose_rows(used)]


def source_facts(parts: Sequence[Part], *, pictures: bool) -> Facts:
    """How many rows there are, and a hash of all their labels and captions and of a few pictures."""
    facts: Facts = {f"data.{name}_rows": len(part.rows) for name, part in zip(PARTS, parts, strict=True)}
    digest = hashlib.sha256()
    for part in parts:
        sides = part.plan().sides
        labels = None if sides.labels is None else sides.labels.tolist()
        digest.update(json.dumps([list(part.rows), labels, sides.captions]).encode())
        for place in spread(len(part.rows), SAMPLED_PICTURES) if pictures else ():
            digest.update(picture_bytes(part.table.row(part.rows[place])[part.config.image_column]))
    return facts | {"data.hash": digest.hexdigest()[:32]}


def picture_bytes(raw: Any) -> bytes:
    try:
        with open_picture(raw) as picture:
            return f"{picture.mode}{picture.size}".encode() + picture.tobytes()
    except (OSError, ValueError, SyntaxError):
        return b"broken"


def difference(before: Facts, now: Facts) -> str | None:
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


def check_facts(folder: Path, before: Facts, now: Facts, advice: str) -> None:
    """Raise if a folder was prepared for something else."""
    differs = difference(before, now)
    if differs is not None:
        raise DataError(f"{folder} was prepared for {differs}: {advice}")


def short_hash(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
