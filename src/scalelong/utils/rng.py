"""Random numbers that are a function of a key: what resumes exactly needs no state of a generator."""

from __future__ import annotations

import hashlib

from torch import Generator


def keyed_generator(seed: int, purpose: str, number: int) -> Generator:
    """A generator whose stream is a function of the key; neighbouring keys give unrelated streams."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return Generator().manual_seed(int.from_bytes(digest, "little"))
