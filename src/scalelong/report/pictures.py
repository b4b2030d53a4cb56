"""Pictures small enough to lie inside the page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .blocks import Picture
from .read import short

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST_SIDE = 560
LARGEST_PNG = 150_000
BUDGET = 2_500_000
"""Bytes of all pictures of a page, whatever it is about."""

# A grid with fewer pixels than this is shown larger, with hard edges.
TINY = 300


@dataclass
class Album:
    """Embeds pictures until the bytes are spent, which all parts of a page share."""

    left: int

    def embed(self, path: Path, label: str, detail: str, warnings: list[str]) -> Picture | None:
        """The picture of a file as part of the page; None, with a warning, where that cannot be."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as opened:
                picture = shrink(opened.convert("L" if opened.mode in ("1", "L") else "RGB"))
        except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            warnings.append(f"{short(path)} could not be shown ({type(error).__name__}).")
            return None
        kind, data = encode(picture)
        if len(data) > self.left:
            warnings.append(f"{short(path)} and later pictures are left out, to keep the page below 5 MB.")
            return None
        self.left -= len(data)
        address = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        return Picture(label, detail, address, *picture.size, pixelated=max(picture.size) < TINY)


def shrink(picture: Image) -> Image:
    """Without an enlargement by a whole factor, which the browser does as well, and not larger than a column shows."""
    from PIL import Image

    nearest = Image.Resampling.NEAREST
    for factor in range(32, 1, -1):
        if picture.width % factor or picture.height % factor:
            continue
        small = picture.resize((picture.width // factor, picture.height // factor), nearest)
        if small.resize(picture.size, nearest).tobytes() == picture.tobytes():
            picture = small
            break
    if max(picture.size) > LONGEST_SIDE:
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    return picture


def encode(picture: Image) -> tuple[str, bytes]:
    """PNG, or JPEG where that would be much larger, as for many photographs."""
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    if file.tell() <= LARGEST_PNG:
        return "png", file.getvalue()
    file = io.BytesIO()
    picture.save(file, format="JPEG", quality=88)
    return "jpeg", file.getvalue()
