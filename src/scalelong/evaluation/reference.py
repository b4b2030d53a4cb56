"""Reference statistics: those of a dataset are built once and found again by its images; kept in .npz files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
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
from ..utils.block_folder import Fingerprint, Progress, block_ranges
from ..utils.runtime import SINGLE, Rank
from ..utils.team import check_shared
from .arrays import IMAGES, StatisticsError, existing, read_arrays, read_images, read_statistics
from .features import BLOCK, Describe, FeatureNetwork, ShareDone, fill_features, stored_features
from .metrics import Moments, Statistics, random_order
from .networks import INCEPTION, RESIZES

# KID, precision and recall take so many images of the reference at most: their cost grows with pairs of images.
KEPT = 10_000
# Raw features are kept beside the file for these three.
FEATURES = ".features.npy"
FOLDER = Path("statistics")

Report = Callable[[str, float, int], None]
"""Called with what is counted, how many of them are done, and of how many."""


def quiet(what: str, done: float, count: int) -> None:
    """The report of a caller that wants none."""


@dataclass(frozen=True)
class Reference:
    """What samples are compared with: statistics, where they come from, and raw features if they were kept."""

    statistics: Statistics
    fingerprint: Fingerprint
    features: Tensor | None = None
    """Shape: (N, D), float32, mapped from the file."""
    spatial: Statistics | None = None
    """Those of the sFID's features, which ADM's batches have."""


def training_images(data: DataConfig, images: int | None = None) -> Part:
    """The images that a recipe trains on; `images` of them at even distances, if given."""
    part = open_parts(data.model_copy(update={"label_column": None, "caption_column": None}))[0]
    if images is None:
        return part
    size = len(part.rows)
    if not 2 <= images <= size:
        raise ValueError(f"there are {size} images to take statistics of, so --images is 2 to {size}")
    return replace(part, rows=[part.rows[place] for place in spread(size, images)])


def decode_images(part: Part, numbers: range, broken: BrokenImages) -> Tensor:
    """Those that can be read. Shape: (B, C, H, W), uint8."""
    return part.take(slice(numbers.start, numbers.stop)).decode(broken).images


def hash_pixels(part: Part, progress: Progress) -> str:
    """A hash of all images' pixels; raises DataError if more than 1 % cannot be read."""
    broken, digest, count = BrokenImages(part.config.source), hashlib.sha256(), len(part.rows)
    for numbers in block_ranges(count, BLOCK).values():
        progress(numbers.start, count)
        digest.update(decode_images(part, numbers, broken).numpy().tobytes())
    progress(count, count)
    broken.check(count)
    broken.report(count)
    return digest.hexdigest()[:16]


def build_reference(
    data: DataConfig,
    network: FeatureNetwork,
    *,
    images: int | None = None,
    folder: Path = FOLDER,
    rank: Rank = SINGLE,
    progress: Report = quiet,
) -> Path:
    """The file of a dataset's statistics, made by all processes if it is not there; all return once it is."""
    part = training_images(data, images)
    content = hash_pixels(part, partial(progress, "images of the dataset read"))
    source = Path(data.source).stem.replace(":", "-")

    def describe(numbers: range, done: ShareDone) -> Tensor:
        return network(decode_images(part, numbers, BrokenImages(data.source)), done)

    shown = partial(progress, "images of the dataset described")
    return make_statistics(folder / source, network, content, len(part.rows), describe, rank, shown)


def describe_batch(file: Path, network: FeatureNetwork, *, rank: Rank = SINGLE, progress: Report = quiet) -> Path:
    """The statistics and raw features of the images in an .npz, made once as those of a dataset are."""
    file = existing(file)
    images, content = read_images(file), sha256_of(file)[:16]

    def describe(numbers: range, done: ShareDone) -> Tensor:
        return network(images[numbers.start : numbers.stop].permute(0, 3, 1, 2), done)

    shown = partial(progress, f"images of {file.name} described")
    return make_statistics(FOLDER / file.stem, network, content, len(images), describe, rank, shown)


def make_statistics(
    source: Path, network: FeatureNetwork, content: str, count: int, describe: Describe, rank: Rank, progress: Progress
) -> Path:
    """The file of some images, beside `source` and named after it, filled by all processes if it is not there."""
    fingerprint = {**network.fingerprint, "data": content}
    path = source.with_name(f"{source.name}-{Path(network.name).stem}-{short_hash(fingerprint)}.npz")
    check_shared(rank, path.parent, "folder of statistics")
    blocks = path.with_suffix(".blocks")
    fill = partial(fill_features, blocks, fingerprint, count, describe, rank, progress)
    if rank.index and not path.is_file():
        fill()
        rank.wait(f"the statistics {path}", path.is_file)
    if not rank.index and not path.is_file():
        # Runs that start together want the same file.
        with locked(path.parent / ".lock", busy=f"another process makes statistics in {path.parent}", wait=None):
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
    """Read an .npz of ours, of pytorch-fid, which says nothing about images, network or weights, or of ADM."""
    path = existing(path)
    arrays = read_arrays(path, {"mu", "sigma", "mu_s", "sigma_s", "fingerprint"})
    statistics, spatial = read_statistics(path, arrays, "mu", "sigma"), None
    try:
        fingerprint: Fingerprint = dict(json.loads(str(arrays.get("fingerprint", "{}"))))
    except (ValueError, TypeError, RecursionError) as error:
        raise StatisticsError(f"{path} does not say what it was made with, as its fingerprint is no JSON") from error
    if {"mu_s", "sigma_s", IMAGES} & arrays.keys():
        # ADM's evaluator runs TensorFlow's graph, which resizes by itself.
        fingerprint = {"network": INCEPTION, "resize": str(RESIZES["tf1"])}
    if {"mu_s", "sigma_s"} & arrays.keys():
        spatial = read_statistics(path, arrays, "mu_s", "sigma_s")
    features = load_kept(path, fingerprint.pop("features", None))
    return Reference(replace(statistics, count=fingerprint.pop("images", None)), fingerprint, features, spatial)


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
