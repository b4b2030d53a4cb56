"""The .npz files that samples are compared with: means and covariances, or images, and what is wrong with others."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .metrics import Statistics

# What numpy calls an array without a name: the images of ADM's batches.
IMAGES = "arr_0"
# Of the largest entry: files may have been written in float32, and products summed in another order.
SYMMETRIC = 1e-5


class StatisticsError(ValueError):
    """A file of statistics that cannot be used."""


def existing(path: str | Path) -> Path:
    path = Path(path).expanduser()
    if not path.is_file():
        raise StatisticsError(f"there are no statistics {str(path)!r}: scalelong stats makes them")
    return path


def read_arrays(path: Path, wanted: Collection[str]) -> dict[str, Any]:
    """The arrays of an .npz by name; None for those that are not wanted, which may be large."""
    with opened(path) as file:
        return {name: file[name] if name in wanted else None for name in file.files}


def read_statistics(path: Path, arrays: Mapping[str, Any], *names: str) -> Statistics:
    """A mean and a covariance of a file, by their names in it; raises StatisticsError where they are none."""
    both = " and ".join(names)
    if not set(names) <= arrays.keys():
        raise StatisticsError(f"{path} has no arrays {both}, but {', '.join(arrays) or 'none'}")
    if kinds := [f"{name} is {arrays[name].dtype}" for name in names if arrays[name].dtype.kind not in "fiu"]:
        raise StatisticsError(f"{path}: {kinds[0]}, not numbers")
    mean, covariance = (torch.from_numpy(arrays[name].astype("float64")) for name in names)
    if mean.ndim != 1 or not len(mean) or covariance.shape != (len(mean), len(mean)):
        shapes = f"{tuple(mean.shape)} and {tuple(covariance.shape)}"
        raise StatisticsError(f"{path}: {both} are {shapes}, not (D,) and (D, D)")
    if not (torch.isfinite(mean).all() and torch.isfinite(covariance).all()):
        raise StatisticsError(f"{path}: {names[0]} or {names[1]} is not finite")
    apart = (covariance - covariance.T).abs().max() / covariance.abs().max().clamp_min(1e-300)
    if apart > SYMMETRIC:
        raise StatisticsError(f"{path}: {names[1]} is not symmetric, so it is no covariance: make the file anew")
    return Statistics(mean, covariance, None)


def read_images(path: Path) -> Tensor:
    """The images of an .npz. Shape: (N, H, W, 3), uint8."""
    with opened(path) as file:
        images = file[IMAGES]
    if images.dtype != "uint8" or images.ndim != 4 or images.shape[-1] != 3:
        raise StatisticsError(
            f"{path}: {IMAGES} is {images.dtype} {images.shape}, and images would be uint8 (N, H, W, 3)"
        )
    return torch.from_numpy(images)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An .npz, of which nothing but arrays is read; raises StatisticsError where it is none."""
    import numpy as np

    try:
        # By a handle of our own: of a damaged file numpy leaves its own open.
        with path.open("rb") as handle:
            found = np.load(handle, allow_pickle=False)
            if isinstance(found, np.ndarray):
                raise ValueError("it holds one array, not several by name; raw features go with the .npz beside them")
            with found:
                yield found
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise StatisticsError(f"{path} is not an .npz that can be read: {error}") from error
