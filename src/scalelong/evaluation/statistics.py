"""Mean and covariance of features, summed in float64 while they stream by, and the files that hold them."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..utils.atomic import atomic_write, sha256_of

Facts = dict[str, str | int | None]

# Raw features are kept for KID, precision and recall; the sum over all images needs none of them.
FEATURES = ".features.npy"


class StatisticsError(ValueError):
    """A file of statistics that cannot be used."""


@dataclass(frozen=True)
class Statistics:
    """Shape: mean (D,), covariance (D, D), both float64; the covariance is divided by count − 1, as numpy's is."""

    mean: Tensor
    covariance: Tensor
    count: int | None
    """None where a file does not say."""

    @property
    def width(self) -> int:
        return len(self.mean)


class Moments:
    """Running count, mean and sum of squared deviations (Chan et al.): parts may come in any sizes.

    >>> x = torch.arange(12.0).view(6, 2)
    >>> moments = Moments().add(x[:1]).add(x[1:])
    >>> moments.statistics().covariance.tolist()
    [[14.0, 14.0], [14.0, 14.0]]
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, 0, dtype=torch.float64)

    def add(self, features: Tensor) -> Moments:
        """Shape: (B, D), of any float type."""
        x = features.double()
        check_finite(x)
        if not len(x):
            return self  # None of a block's images could be read.
        mean = x.mean(0)
        centred = x - mean
        return self._merge(len(x), mean, centred.T @ centred)

    def without(self, part: Moments) -> Moments:
        """The moments of what was added except one part, which is known."""
        rest = Moments()
        rest.count = self.count - part.count
        rest.mean = (self.mean * self.count - part.mean * part.count) / rest.count
        step = part.mean - rest.mean
        rest.scatter = (self.scatter - part.scatter).addr_(step, step, alpha=-rest.count * part.count / self.count)
        return rest

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> Moments:
        if not self.count:
            self.count, self.mean, self.scatter = count, mean.clone(), scatter.clone()
            return self
        total, step = self.count + count, mean - self.mean
        self.scatter += scatter
        self.scatter.addr_(step, step, alpha=self.count * count / total)
        self.mean = self.mean + step * (count / total)
        self.count = total
        return self

    def statistics(self) -> Statistics:
        if self.count < 2:
            raise ValueError(f"a covariance needs at least two images, not {self.count}")
        return Statistics(self.mean, self.scatter / (self.count - 1), self.count)


def check_finite(features: Tensor) -> None:
    if not torch.isfinite(features).all():
        raise ValueError("features are not finite: the images, or the feature network, are broken")


def statistics_of(features: Tensor, block: int = 4096) -> Statistics:
    """The statistics of features in memory, or mapped from a file. Shape: (N, D)."""
    moments = Moments()
    for part in features.split(block):
        moments.add(part)
    return moments.statistics()


@dataclass(frozen=True)
class Reference:
    """What drawn images are compared with: statistics, where they come from, and raw features if they were kept."""

    statistics: Statistics
    facts: Facts
    features: Tensor | None = None
    """Shape: (N, D), float32, mapped from the file."""


def save_reference(path: Path, reference: Reference) -> Path:
    """Write an .npz with the keys mu and sigma, as pytorch-fid reads it, and the features beside it."""
    import numpy as np

    facts: dict[str, Any] = {**reference.facts, "images": reference.statistics.count}
    path.parent.mkdir(parents=True, exist_ok=True)
    if reference.features is not None:
        features = reference.features.numpy()
        atomic_write(path.with_suffix(FEATURES), lambda temporary: save_array(temporary, features))
        facts["features"] = sha256_of(path.with_suffix(FEATURES))
    arrays = {
        "mu": reference.statistics.mean.numpy(),
        "sigma": reference.statistics.covariance.numpy(),
        "facts": np.array(json.dumps(facts)),
    }
    atomic_write(path, lambda temporary: save_arrays(temporary, arrays))
    return path


def save_array(path: Path, array: Any) -> None:
    import numpy as np

    with path.open("wb") as file:
        np.save(file, array)


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    import numpy as np

    # Through a handle: by name numpy would add .npz to the temporary one.
    with path.open("wb") as file:
        np.savez(file, **arrays)


def load_reference(path: str | Path) -> Reference:
    """Read an .npz of ours or of pytorch-fid; the latter says nothing about images, network or weights."""
    import numpy as np

    path = Path(path).expanduser()
    if not path.is_file():
        raise StatisticsError(f"there are no statistics {str(path)!r}: scalelong stats makes them")
    try:
        # By a handle of our own: of a damaged file numpy leaves its own open.
        with path.open("rb") as opened, open_arrays(opened) as file:
            if not {"mu", "sigma"} <= set(file.files):
                raise StatisticsError(f"{path} has no arrays mu and sigma, but {', '.join(file.files) or 'none'}")
            mean, covariance = (torch.from_numpy(np.asarray(file[key], dtype=np.float64)) for key in ("mu", "sigma"))
            facts: dict[str, Any] = json.loads(str(file["facts"])) if "facts" in file.files else {}
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        if isinstance(error, StatisticsError):
            raise
        raise StatisticsError(f"{path} is not an .npz that can be read: {error}") from error
    check_shapes(path, mean, covariance)
    features = load_features_of(path, facts.pop("features", None))
    return Reference(Statistics(mean, covariance, facts.pop("images", None)), facts, features)


def open_arrays(file: BinaryIO) -> Any:
    """The arrays of an .npz by name; raises ValueError if the file holds a single array."""
    import numpy as np

    found = np.load(file, allow_pickle=False)
    if isinstance(found, np.ndarray):
        raise ValueError("it holds one array, not several by name; raw features go with the .npz beside them")
    return found


def check_shapes(path: Path, mean: Tensor, covariance: Tensor) -> None:
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        shapes = f"{tuple(mean.shape)} and {tuple(covariance.shape)}"
        raise StatisticsError(f"{path}: mu and sigma are {shapes}, not (D,) and (D, D)")
    if not (torch.isfinite(mean).all() and torch.isfinite(covariance).all()):
        raise StatisticsError(f"{path}: mu or sigma is not finite")


def load_features_of(path: Path, digest: str | None) -> Tensor | None:
    """The raw features beside a file, mapped; None if none were kept, or they were left behind."""
    import numpy as np

    file = path.with_suffix(FEATURES)
    if digest is None or not file.is_file():
        return None
    if sha256_of(file) != digest:
        raise StatisticsError(f"{file} does not match {path.name}: remove both, and make them anew")
    # Copy-on-write: torch wants memory that it might write to.
    return torch.from_numpy(np.load(file, mmap_mode="c"))
