"""Pictures, and the files that hold them, made for a test."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from PIL import Image
from torch import Tensor

from scalelong.data import DataConfig


def config(source: Any, **options: Any) -> DataConfig:
    return DataConfig(**{"source": str(source), "image_size": 6, "validation_count": 2, **options})


def pictures(count: int, *, size: int = 6) -> list[Image.Image]:
    return [picture_of(torch.randint(0, 256, (3, size, size), dtype=torch.uint8)) for _ in range(count)]


def picture_of(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def pixels_of(picture: Image.Image) -> Tensor:
    raw = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return raw.view(picture.height, picture.width, -1).permute(2, 0, 1)


def stacked(items: list[Image.Image]) -> Tensor:
    return torch.stack(list(map(pixels_of, items)))


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def write_parquet(file: Path, **columns: list[Any]) -> Path:
    file.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


def encoded(items: list[Image.Image]) -> list[dict[str, Any]]:
    """As the hub stores images: the file's bytes and its name."""
    return [{"bytes": saved(item), "path": None} for item in items]


def write_zip(file: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file


def write_tar(file: Path, members: dict[str, bytes]) -> Path:
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file
