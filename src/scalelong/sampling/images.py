"""Images as PNG files, one by one or as a grid."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from ..utils.atomic import atomic_write

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SHORTEST_SIDE = 400


def tile(images: Tensor, *, gap: int = 1) -> Tensor:
    """Images side by side in a near-square grid with a white gap. Shape: (N, C, H, W) → (C, grid height, grid width).

    >>> tile(torch.zeros(5, 1, 8, 8, dtype=torch.uint8)).shape
    torch.Size([1, 19, 28])
    """
    count, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    sheet = images.new_full((channels, rows * (height + gap) + gap, columns * (width + gap) + gap), 255)
    for index, image in enumerate(images):
        top, left = gap + index // columns * (height + gap), gap + index % columns * (width + gap)
        sheet[:, top : top + height, left : left + width] = image
    return sheet


def to_picture(image: Tensor) -> Picture:
    """Shape: (C, H, W), uint8, with one channel or three."""
    from PIL import Image

    return Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())


def read_image(file: Path | BinaryIO) -> Tensor:
    """Shape: (C, H, W), uint8."""
    from PIL import Image

    with Image.open(file) as picture:
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return pixels.view(picture.height, picture.width, -1).permute(2, 0, 1)


def save_grid(images: Tensor, path: Path) -> None:
    """A grid as PNG, small images enlarged by a whole factor without smoothing. Shape: (N, C, H, W), uint8."""
    from PIL import Image

    picture = to_picture(tile(images))
    factor = math.ceil(SHORTEST_SIDE / min(picture.size))
    large = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda temporary: large.save(temporary, format="PNG"))
