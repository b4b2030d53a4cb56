"""Images as PNG files, one by one or as a grid."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..utils.atomic import writing

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SHORTEST_SIDE = 400


def tile(images: Tensor, *, gap: int = 1) -> Tensor:
    """Images side by side in a near-square grid with a white gap. Shape: (N, C, H, W) → (C, grid height, grid width).

    >>> import torch
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

    channels, height, width = image.shape
    mode = {1: "L", 3: "RGB"}[channels]
    return Image.frombytes(mode, (width, height), bytes(image.permute(1, 2, 0).contiguous().flatten().tolist()))


def save_grid(images: Tensor, path: Path) -> None:
    """A grid as PNG, small images enlarged by a whole factor without smoothing. Shape: (N, C, H, W), uint8."""
    from PIL import Image

    picture = to_picture(tile(images))
    factor = math.ceil(SHORTEST_SIDE / min(picture.size))
    save_picture(picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST), path)


def save_picture(picture: Picture, path: Path) -> None:
    """Write a PNG under a temporary name first, so that there is never half of one.

    Not by `atomic_write`: it would wait for the disk at each of many thousand images, and what a killed process leaves
    behind has to be replaced by the next, which draws the image again.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(temporary, format="PNG")
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
