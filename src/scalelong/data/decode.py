"""From rows to pixels of the recipe's size, in several threads, in the order of the rows."""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .config import DataConfig
from .errors import DataError, first_line
from .sources import ZipMember

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Item = TypeVar("Item")
Result = TypeVar("Result")

# Rows per task: a task for each small picture would cost as much as the picture.
CHUNK = 16
# Whose 16-bit pictures PIL reads as integers of 32 bits.
SIXTEEN_BIT_FORMATS = ("PNG", "PPM")


def decode(name: str, raw: Any, config: DataConfig) -> Tensor | str:
    """The pixels of a row's picture, or why it could not be read. Shape: (C, H, W), uint8."""
    try:
        with open_picture(raw) as picture:
            return to_pixels(picture, config)
    except DataError as error:
        raise DataError(f"{error} ({name})") from error
    except MemoryError:
        raise
    except Exception as error:  # Damaged files make PIL raise a dozen kinds of errors.
        # What PIL read from is bytes in memory, whose address says nothing.
        return re.sub(r" <_io.BytesIO[^>]*>", "", f"{type(error).__name__}: {first_line(error)}")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """As `map`, computed ahead by so many threads.

    >>> list(ordered_map(abs, [-3, 1, -2], workers=2))
    [3, 1, 2]
    """
    source = iter(items)
    waiting: deque[Future[list[Result]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    try:
        while True:
            while len(waiting) < 2 * workers and (chunk := list(islice(source, CHUNK))):
                waiting.append(pool.submit(lambda part: [function(item) for item in part], chunk))
            if not waiting:
                return
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def row_name(number: str, picture: Any) -> str:
    """How messages call a row: by its number, and by its file if that is known.

    >>> row_name("row 7", {"bytes": None, "path": "cat.png"})
    'row 7 (cat.png)'
    """
    if isinstance(picture, dict):
        picture = picture.get("path")
    path = picture if isinstance(picture, str) else getattr(picture, "name", None)
    return f"{number} ({path})" if path else number


def open_picture(raw: Any) -> Picture:
    """A picture from its bytes, from the file or archive they are in, or from an array of its grey levels."""
    from PIL import Image

    if isinstance(raw, dict):
        raw = raw.get("path") if raw.get("bytes") is None else raw["bytes"]
    if raw is None:
        raise ValueError("the row has no picture")
    if isinstance(raw, ZipMember):
        raw = raw.read()
    if isinstance(raw, (bytes, str)):
        return Image.open(raw if isinstance(raw, str) else io.BytesIO(raw))
    return Image.fromarray(raw)


def to_pixels(picture: Picture, config: DataConfig) -> Tensor:
    """Upright, in the recipe's colours, size and fit. Shape: (C, H, W), uint8."""
    from PIL import ImageOps

    # Of floats and 32-bit integers nothing says what is white.
    if picture.mode == "F" or (picture.mode == "I" and picture.format not in SIXTEEN_BIT_FORMATS):
        kind = "floats" if picture.mode == "F" else "32-bit integers"
        raise ValueError(f"its pixels are {kind}, whose range is not known; save it with 8 or 16 bits")
    picture = opaque(eight_bit(ImageOps.exif_transpose(picture))).convert("L" if config.channels == 1 else "RGB")
    pixels = torch.frombuffer(bytearray(fit(picture, config).tobytes()), dtype=torch.uint8)
    return pixels.view(config.image_size, config.image_size, config.channels).permute(2, 0, 1)


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
