"""From rows to pixels of the recipe's size, in several threads, in the order of the rows."""

from __future__ import annotations

import io
import logging
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .batches import ImageSet
from .config import DataConfig, DataError, first_line
from .folders import ZipMember
from .sources import Captions, Table, first_few, narrow, open_tables, pick_split, read_captions, read_labels

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

# Called with the number of decoded images and their total.
Progress = Callable[[int, int], None]

# The part of the images that may be broken.
TOLERATED = 0.01
# Rows per task: a task for each small picture would cost as much as the picture.
CHUNK = 16
# As PIL warns of: more are a bomb, of some kB that unpack to GBs, rather than a photograph.
MOST_PIXELS = 89_478_485
# Whose 16-bit pictures PIL reads as integers of 32 bits.
SIXTEEN_BIT_FORMATS = ("PNG", "PPM")


@dataclass(frozen=True)
class Part:
    """Rows of a table, with their labels and captions where the recipe asks for them. Shape: labels (N,), int64."""

    table: Table
    rows: Sequence[int]
    config: DataConfig
    labels: Tensor | None = None
    captions: Sequence[Captions] | None = None

    @classmethod
    def of(cls, table: Table, rows: Sequence[int], config: DataConfig, classes: int | None) -> Part:
        """Some rows; raises DataError where labels or captions cannot be used, before anything is decoded."""
        table, names, labels, captions = narrow(table, config), [f"row {row}" for row in rows], None, None
        if (column := config.label_column) is not None:
            labels = read_labels(table.values(column, rows), names, classes, table.describe(column))
        if (column := config.caption_column) is not None:
            captions = read_captions(table.values(column, rows), names, table.describe(column))
        return cls(table, rows, config, labels, captions)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, some: slice) -> Part:
        """Those at some places."""
        labels, captions = (None if each is None else each[some] for each in (self.labels, self.captions))
        return replace(self, rows=self.rows[some], labels=labels, captions=captions)

    def decode(self, broken: BrokenImages, count: Callable[[], None] = lambda: None) -> ImageSet:
        """Decode in several threads; what cannot be read is left out and added to `broken`."""
        config = self.config
        pictures = (raw[config.image_column] for raw in self.table.rows(self.rows))
        named = ((row_name(f"row {row}", picture), picture) for row, picture in zip(self.rows, pictures, strict=True))
        images = torch.empty(len(self), config.channels, config.image_size, config.image_size, dtype=torch.uint8)
        kept: list[int] = []
        decoded = ordered_map(lambda pair: (pair[0], decode(*pair, config)), named, config.workers)
        for position, (name, pixels) in enumerate(decoded):
            if isinstance(pixels, str):
                broken.found.append((name, pixels))
            else:
                # Without gaps: to close one later would take the memory of all images again.
                images[len(kept)] = pixels
                kept.append(position)
            count()
        labels = None if self.labels is None else self.labels[kept]
        captions = None if self.captions is None else tuple(self.captions[row] for row in kept)
        return ImageSet(images[: len(kept)], labels, captions)


def open_parts(config: DataConfig, classes: int | None = None) -> list[Part]:
    """What there is to train on, and for validation; raises DataError where it is not as the recipe says."""
    tables = open_tables(config.source, config.config, allow_paths=config.allow_paths)
    train = pick_split(tables, config.train_split, "train_split")
    size, count = len(train), config.validation_count
    if config.validation_split is not None:
        validation = pick_split(tables, config.validation_split, "validation_split")
        chosen = [(train, range(size)), (validation, spread(len(validation), count))]
    elif count < size:
        taken = spread(size, count)
        chosen = [(train, sorted(set(range(size)) - set(taken))), (train, taken)]
    else:
        taking = f"taking {count} of {size} images for validation leaves none to train on"
        raise DataError(f"data.validation_count: {taking}")
    return [Part.of(table, rows, config, classes) for table, rows in chosen]


def spread(size: int, count: int) -> Sequence[int]:
    """`count` rows (all, if there are fewer) at even distances, so that a table sorted by class gives all classes.

    >>> spread(10, 4)
    [0, 2, 5, 7]
    """
    count = min(size, count)
    return [row * size // count for row in range(count)]


@dataclass
class BrokenImages:
    """The images of a source that could not be read, by the names of their rows, with the reasons."""

    source: str
    found: list[tuple[str, str]] = field(default_factory=list)

    def check(self, total: int) -> None:
        """Raise if more than 1 % of so many images are broken."""
        if len(self.found) > TOLERATED * total:
            raise DataError(f"data.source: {self.describe(total)}; more than 1 % stops the run")

    def report(self, total: int) -> None:
        """Log what was skipped, if anything was."""
        if self.found:
            logger.warning("skipped: %s", self.describe(total))

    def describe(self, total: int) -> str:
        few = first_few([f"{name}: {reason}" for name, reason in self.found])
        return f"{len(self.found)} of {total} images of {self.source} could not be read ({few})"


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
        picture = Image.open(raw if isinstance(raw, str) else io.BytesIO(raw))
        if picture.width * picture.height > MOST_PIXELS:
            raise ValueError(f"it has {picture.width}×{picture.height} pixels, and at most {MOST_PIXELS:,} are read")
        return picture
    return Image.fromarray(raw)


def to_pixels(picture: Picture, config: DataConfig) -> Tensor:
    """Upright, in the recipe's colours, size and fit. Shape: (C, H, W), uint8."""
    from PIL import ImageOps

    # Of floats and 32-bit integers nothing says what is white.
    if picture.mode == "F" or (picture.mode == "I" and picture.format not in SIXTEEN_BIT_FORMATS):
        kind = "floats" if picture.mode == "F" else "32-bit integers"
        raise ValueError(f"its pixels are {kind}, whose range is not known; save it with 8 or 16 bits")
    picture = opaque(eight_bit(ImageOps.exif_transpose(picture))).convert("L" if config.channels == 1 else "RGB")
    pixels = torch.frombuffer(bytearray(fit(cut(picture, config), config).tobytes()), dtype=torch.uint8)
    return pixels.view(config.image_size, config.image_size, config.channels).permute(2, 0, 1)


def cut(picture: Picture, config: DataConfig) -> Picture:
    """What lies in the recipe's box."""
    if config.box is None:
        return picture
    left, top, right, bottom = config.box
    if right > picture.width or bottom > picture.height:
        seen = f"{config.box} reaches out of {picture.width}×{picture.height}"
        raise DataError(f"data.box: {seen}; choose a smaller box, or null to take whole images")
    return picture.crop((left, top, right, bottom))


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
