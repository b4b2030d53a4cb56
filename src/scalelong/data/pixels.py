"""From a picture of any size and mode to the tensor that a recipe asks for."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .config import DataConfig
from .errors import DataError
from .tables import ZipMember

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


# Whose 16-bit pictures PIL reads as integers of 32 bits.
SIXTEEN_BIT_FORMATS = ("PNG", "PPM")


def open_picture(raw: Any) -> Picture:
    """A picture from its bytes, from the file or archive they are in, or from an array of its grey levels."""
    from PIL import Image

    if isinstance(raw, dict):
        raw = raw.get("path") if raw.get("bytes") is None else raw["bytes"]
    if raw is None:
        raise ValueError("the row has no picture")
    if isinstance(raw, ZipMember):
        raw = raw.read()
    if isinstance(raw, str) and "://" in raw:
        raw = read_remote(raw)
    if isinstance(raw, (bytes, str)):
        return Image.open(raw if isinstance(raw, str) else io.BytesIO(raw))
    return Image.fromarray(raw)


def read_remote(address: str) -> bytes:
    """A file that the `datasets` library streams, which only has its address."""
    import fsspec

    file: Any = fsspec.open(address, "rb")
    with file as opened:
        return opened.read()


def to_pixels(picture: Picture, config: DataConfig) -> Tensor:
    """Upright, in the recipe's colours, size and fit. Shape: (C, H, W), uint8."""
    from PIL import ImageOps

    refuse_deep(picture)
    picture = ImageOps.exif_transpose(picture)
    picture = opaque(eight_bit(picture)).convert("L" if config.channels == 1 else "RGB")
    picture = fit(picture, config)
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.view(config.image_size, config.image_size, config.channels).permute(2, 0, 1)


def refuse_deep(picture: Picture) -> None:
    """Raise for floats and 32-bit integers, of which nothing says what is white."""
    if picture.mode == "F" or (picture.mode == "I" and picture.format not in SIXTEEN_BIT_FORMATS):
        kind = "floats" if picture.mode == "F" else "32-bit integers"
        raise ValueError(f"its pixels are {kind}, whose range is not known; save it with 8 or 16 bits")


def eight_bit(picture: Picture) -> Picture:
    """16-bit grey divided by 256; PIL would clip it to 255 instead. Other pictures stay as they are."""
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return picture


def opaque(picture: Picture) -> Picture:
    """Transparent parts laid over white."""
    from PIL import Image

    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)


def fit(picture: Picture, config: DataConfig) -> Picture:
    """The picture as a square of the recipe's size."""
    from PIL import Image, ImageOps

    side = config.image_size
    if config.fit == "crop":
        # PIL widens the filter when it shrinks a picture, so this does not alias.
        return ImageOps.fit(picture, (side, side), method=Image.Resampling.BICUBIC)
    width, height = picture.size
    if max(width, height) > side:
        raise DataError(f"data.fit: {width}×{height} is larger than the {side}×{side} to pad it to; use data.fit: crop")
    frame = Image.new(picture.mode, (side, side))
    frame.paste(picture, ((side - width) // 2, (side - height) // 2))
    return frame
