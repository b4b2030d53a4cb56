"""Reference statistics: those of a dataset are built once and found again by its images; kept in .npz files."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import DataConfig
from ..data.decode import BrokenImages, Part, open_parts, spread
from ..data.sources import short_hash
from ..utils.atomic import atomic_write, locked, sha256_of
from ..utils.blocks import Fingerprint, Progress, block_ranges, wait_until
from ..utils.process import SINGLE, Rank
from .features import BLOCK, FeatureNetwork, ShareDone, fill_features, stored_features
from .metrics import Moments, Statistics, random_order

# KID, precision and recall take so many images of the reference at most: their cost grows with pairs of images.
KEPT = 10_000
# Raw features are kept beside the file for these three.
FEATURES = ".features.npy"

Report = Callable[[str, float, int], None]
"""Called with what is counted, how many of them are done, and of how many."""


def quiet(what: str, done: float, count: int) -> None:
    """The report of a caller that wants none."""


class StatisticsError(ValueError):
    """A file of statistics that cannot be used."""


@dataclass(frozen=True)
class Reference:
    """What samples are compared with: statistics, where they come from, and raw features if they were kept."""

    statistics: Statistics
    fingerprint: Fingerprint
    features: Tensor | None = None
    """Shape: (N, D), float32, mapped from the file."""


def training_images(data: DataConfig, images: int | None = None) -> Part:
    """The images that a recipe trains on; `images` of them at even distances, if given."""
    part = open_parts(data.model_copy(update={"label_column": None, "caption_column": None}))[0]
    if images is None:
        return part
    size = len(part.rows)
    if not 2 <= images <= size:
        raise ValueError(f"there are {size} images to take statistics of, so --images is 2 to {size}")
    return replace(part, rows=[part.rows[place] for place in spread(size, images)])


def read_images(part: Part, numbers: range, broken: BrokenImages) -> Tensor:
    """Those that can be read. Shape: (B, C, H, W), uint8."""
    return part.take(slice(numbers.start, numbers.stop)).decode(broken).images


def hash_pixels(part: Part, progress: Progress) -> str:
    """A hash of all images' pixels; raises DataError if more than 1 % cannot be read."""
    broken, digest, count = BrokenImages(part.config.source), hashlib.sha256(), len(part.rows)
    for numbers in block_ranges(count, BLOCK).values():
        progress(numbers.start, count)
        digest.update(read_images(part, numbers, broken).numpy().tobytes())
    progress(count, count)
    broken.check(count)
    broken.report(count)
    return digest.hexdigest()[:16]


def build_reference(
    data: DataConfig,
    network: FeatureNetwork,
    *,
    images: int | None = None,
    folder: Path = Path("statistics"),
    rank: Rank = SINGLE,
    progress: Report = quiet,
) -> Path:
    """The file of a dataset's statistics, made by all processes if it is not there; all return once it is."""
    part = training_images(data, images)
    content = hash_pixels(part, partial(progress, "images of the dataset read"))
    fingerprint = {**network.fingerprint, "data": content}
    source, called = Path(data.source).stem.replace(":", "-"), Path(network.name).stem
    path = folder / f"{source}-{called}-{short_hash(fingerprint)}.npz"
    blocks, count = path.with_suffix(".blocks"), len(part.rows)

    def describe(numbers: range, done: ShareDone) -> Tensor:
        return network(read_images(part, numbers, BrokenImages(data.source)), done)

    shown = partial(progress, "images of the dataset described")
    fill = partial(fill_features, blocks, fingerprint, count, describe, rank, shown)
    if rank.index and not path.is_file():
        fill()
        wait_until(path.is_file)
    if not rank.index and not path.is_file():
        # Runs that start together want the same file.
        with locked(folder / ".lock", busy=f"another process makes statistics in {folder}", wait=None):
            if not path.is_file() and fill():
                moments = Moments()
                for features in stored_features(blocks, count):  # One block in memory at a time.
                    moments.add(features)
                kept = pick(stored_features(blocks, count), moments.count)
                save_reference(path, Reference(moments.statistics(), fingerprint, kept))
                shutil.rmtree(blocks, ignore_errors=True)
    return path


def pick(parts: Iterator[Tensor], count: int) -> Tensor:
    """The features that come first in a random order of all, KEPT at most. Shape: parts (B, D) → (K, D)."""
    chosen, start = random_order(count)[:KEPT], 0
    kept: list[Tensor] = []
    places: list[Tensor] = []
    for part in parts:
        own = ((chosen >= start) & (chosen < start + len(part))).nonzero().flatten()
        kept.append(part[chosen[own] - start])
        places.append(own)
        start += len(part)
    return torch.cat(kept)[torch.cat(places).argsort()]


def save_reference(path: Path, reference: Reference) -> Path:
    """Write an .npz with the keys mu and sigma, as pytorch-fid reads it, and the features beside it."""
    import numpy as np

    fingerprint: Fingerprint = {**reference.fingerprint, "images": reference.statistics.count}
    path.parent.mkdir(parents=True, exist_ok=True)
    if reference.features is not None:
        file, features = path.with_suffix(FEATURES), reference.features.numpy()
        atomic_write(file, lambda temporary: write_array(temporary, np.save, arr=features))
        fingerprint["features"] = sha256_of(file)
    arrays = {
        "mu": reference.statistics.mean.numpy(),
        "sigma": reference.statistics.covariance.numpy(),
        "fingerprint": np.array(json.dumps(fingerprint)),
    }
    atomic_write(path, lambda temporary: write_array(temporary, np.savez, **arrays))
    return path


def write_array(path: Path, save: Callable[..., None], **arrays: Any) -> None:
    # Through a handle: by name numpy would add a suffix to the temporary one.
    with path.open("wb") as file:
        save(file, **arrays)


def load_reference(path: str | Path) -> Reference:
    """Read an .npz of ours or of pytorch-fid; the latter says nothing about images, network or weights."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise StatisticsError(f"there are no statistics {str(path)!r}: scalelong stats makes them")
    arrays = read_arrays(path)
    if not {"mu", "sigma"} <= arrays.keys():
        raise StatisticsError(f"{path} has no arrays mu and sigma, but {', '.join(arrays) or 'none'}")
    mean, covariance = (torch.from_numpy(arrays[key]).double() for key in ("mu", "sigma"))
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        shapes = f"{tuple(mean.shape)} and {tuple(covariance.shape)}"
        raise StatisticsError(f"{path}: mu and sigma are {shapes}, not (D,) and (D, D)")
    if not (torch.isfinite(mean).all() and torch.isfinite(covariance).all()):
        raise StatisticsError(f"{path}: mu or sigma is not finite")
    fingerprint: Fingerprint = json.loads(str(arrays.get("fingerprint", "{}")))
    features = load_kept(path, fingerprint.pop("features", None))
    return Reference(Statistics(mean, covariance, fingerprint.pop("images", None)), fingerprint, features)


def read_arrays(path: Path) -> Mapping[str, Any]:
    """The arrays of an .npz by name."""
    import numpy as np

    try:
        # By a handle of our own: of a damaged file numpy leaves its own open.
        with path.open("rb") as opened:
            found = np.load(opened, allow_pickle=False)
            if isinstance(found, np.ndarray):
                raise ValueError("it holds one array, not several by name; raw features go with the .npz beside them")
            with found:
                return dict(found)
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise StatisticsError(f"{path} is not an .npz that can be read: {error}") from error


def load_kept(path: Path, digest: str | None) -> Tensor | None:
    """The raw features beside a file, mapped; None if none were kept, or they were left behind."""
    import numpy as np

    file = path.with_suffix(FEATURES)
    if digest is None or not file.is_file():
        return None
    if sha256_of(file) != digest:
        raise StatisticsError(f"{file} does not match {path.name}: remove both, and make them anew")
    # Copy-on-write: torch wants memory that it might write to.
    return torch.from_numpy(np.load(file, mmap_mode="c"))
