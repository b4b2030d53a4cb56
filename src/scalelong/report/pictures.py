"""Pictures small enough to lie inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .blocks import Picture
from .read import Notes, short

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST_SIDE = 560
LARGEST_PNG = 150_000
BUDGET = 2_500_000
"""Bytes of all pictures of a page, whatever it is about."""

# A grid with fewer pixels than this is shown larger, with hard edges.
TINY = 300


@dataclass
class Budget:
    """The bytes that are left for pictures."""

    left: int = BUDGET


@dataclass(frozen=True)
class Album:
    """Embeds the pictures of a part of the page until the bytes are spent, which all parts share."""

    notes: Notes
    budget: Budget = field(default_factory=Budget)

    def embed(self, path: Path, label: str, detail: str) -> Picture | None:
        """The picture of a file as part of the page; None, with a note, where that cannot be."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as opened:
                picture = shrink(opened.convert("L" if opened.mode in ("1", "L") else "RGB"))
        except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            self.notes.add(f"{short(path)} could not be shown ({type(error).__name__}).")
            return None
        kind, data = encode(picture)
        if len(data) > self.budget.left:
            self.notes.add(f"{short(path)} and later pictures are left out, to keep the page below 5 MB.")
            return None
        self.budget.left -= len(data)
        address = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        return Picture(label, detail, address, *picture.size, pixelated=max(picture.size) < TINY)


def shrink(picture: Image) -> Image:
    """Without an enlargement by a whole factor, which the browser does as well, and not larger than a column shows."""
    from PIL import Image

    factor = enlargement(picture)
    if factor > 1:
        size = (picture.width // factor, picture.height // factor)
        picture = picture.resize(size, Image.Resampling.NEAREST)
    if max(picture.size) > LONGEST_SIDE:
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    return picture


def enlargement(picture: Image) -> int:
    """The largest whole factor by which every pixel was repeated."""
    from PIL import Image

    for factor in fitting(picture.size):
        small = picture.resize((picture.width // factor, picture.height // factor), Image.Resampling.NEAREST)
        if small.resize(picture.size, Image.Resampling.NEAREST).tobytes() == picture.tobytes():
            return factor
    return 1


def fitting(size: tuple[int, int]) -> Iterable[int]:
    """Factors that divide both sides, the largest first.

    >>> list(fitting((12, 18)))
    [6, 3, 2]
    """
    return (factor for factor in range(32, 1, -1) if not size[0] % factor and not size[1] % factor)


def encode(picture: Image) -> tuple[str, bytes]:
    """PNG, or JPEG where that would be much larger, as for many photographs."""
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    if file.tell() <= LARGEST_PNG:
        return "png", file.getvalue()
    file = io.BytesIO()
    picture.save(file, format="JPEG", quality=88)
    return "jpeg", file.getvalue()
