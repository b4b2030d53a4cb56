"""Reference statistics of a dataset, built once and found again by the content of its images."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..data import DataConfig
from ..data.columns import narrow
from ..data.dataset import choose_rows, decode_plan, plan_rows, spread
from ..data.errors import BrokenImages
from ..data.fingerprint import short_hash
from ..data.tables import Table
from ..runs.run_dir import fcntl
from ..sampling.sample_folder import Progress, wait_until
from ..utils.distributed import SINGLE, Rank
from .blocks import BLOCK, Blocks
from .facts import network_facts
from .feature_network import FeatureNetwork, hash_of_images
from .metrics import random_order
from .progress import DESCRIBED, READ, Report, phase, unseen
from .statistics import Facts, Moments, Reference, load_reference, save_reference

FOLDER = Path("statistics")
# KID, precision and recall take so many images of the reference at most: their cost grows with pairs of images.
KEPT = 10_000


@dataclass(frozen=True)
class Pictures:
    """The training images of a dataset, or some of them at even distances, decoded a block at a time."""

    table: Table
    rows: Sequence[int]
    config: DataConfig

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: range, broken: BrokenImages | None = None) -> Tensor:
        """Those that can be read. Shape: (B, C, H, W), uint8."""
        plan = plan_rows(self.table, self.rows[numbers.start : numbers.stop], self.config, None)
        return decode_plan(plan, self.config, broken or BrokenImages(self.config.source)).images

    def content(self, progress: Progress) -> str:
        """A hash of their pixels; raises DataError if more than 1 % cannot be read."""
        broken = BrokenImages(self.config.source)
        digest = hash_of_images(self._all(broken, progress))
        broken.check(len(self))
        broken.report(len(self))
        return digest[:16]

    def _all(self, broken: BrokenImages, progress: Progress) -> Iterator[Tensor]:
        for start in range(0, len(self), BLOCK):
            progress(start, len(self))
            yield self.read(range(start, start + BLOCK), broken)
        progress(len(self), len(self))


def open_pictures(data: DataConfig, images: int | None = None) -> Pictures:
    """The images that a recipe trains on; `images` of them, if given."""
    used = data.model_copy(update={"label_column": None, "caption_column": None})
    table, rows = choose_rows(used)[0]
    if images is not None:
        if not 2 <= images <= len(rows):
            raise ValueError(f"there are {len(rows)} images to take statistics of, so --images is 2 to {len(rows)}")
        rows = [rows[place] for place in spread(len(rows), images)]
    return Pictures(narrow(table, used), rows, used)


def build_reference(
    data: DataConfig,
    network: FeatureNetwork,
    *,
    images: int | None = None,
    folder: Path = FOLDER,
    rank: Rank = SINGLE,
    report: Report = unseen,
) -> Path | None:
    """The file of a dataset's statistics, made if it is not there; None in processes that are not the first."""
    path = work_on_reference(data, network, images, folder, rank, report)
    return path if rank.index == 0 else None


def await_reference(
    data: DataConfig,
    network: FeatureNetwork,
    rank: Rank = SINGLE,
    *,
    folder: Path = FOLDER,
    report: Report = unseen,
) -> Reference:
    """A dataset's statistics in every process, made by all of them if they are not there."""
    path = work_on_reference(data, network, None, folder, rank, report)
    wait_until(path.is_file)
    return load_reference(path)


def work_on_reference(
    data: DataConfig, network: FeatureNetwork, images: int | None, folder: Path, rank: Rank, report: Report
) -> Path:
    """Where a dataset's statistics are, or will be once every process has done its share."""
    pictures = open_pictures(data, images)
    facts = {**network_facts(network), "data": pictures.content(phase(report, READ))}
    path = folder / file_name(data, network, facts)
    if path.is_file():
        load_reference(path)  # Raises if it is damaged.
        return path

    def make(numbers: range, told: Callable[[float], None]) -> Tensor:
        return network(pictures.read(numbers), told)

    blocks = Blocks(path.with_suffix(".blocks"), facts, len(pictures), make, phase(report, DESCRIBED))
    (help_with if rank.index else make_reference)(blocks, rank, path)
    return path


def file_name(data: DataConfig, network: FeatureNetwork, facts: Facts) -> str:
    return f"{Path(data.source).stem.replace(':', '-')}-{Path(network.name).stem}-{short_hash(facts)}.npz"


def make_reference(blocks: Blocks, rank: Rank, path: Path) -> None:
    """Write the file, in the first process, from the blocks of all."""
    with turn_in(path.parent):
        # Else another command made it in the meantime.
        if not path.is_file() and blocks.fill(rank):
            save_reference(path, summarise(blocks))
            shutil.rmtree(blocks.folder, ignore_errors=True)


def help_with(blocks: Blocks, rank: Rank, path: Path) -> None:
    """Compute this process's blocks, unless another command has made the file and removed them meanwhile."""
    try:
        blocks.fill(rank)
    except FileNotFoundError:
        if not path.is_file():
            raise


def summarise(blocks: Blocks) -> Reference:
    """Statistics of finished blocks, and some of their features, with no more than one block in memory at a time."""
    moments = Moments()
    for part in blocks.parts():
        moments.add(part)
    return Reference(moments.statistics(), blocks.facts, pick(blocks.parts(), moments.count))


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


@contextmanager
def turn_in(folder: Path) -> Iterator[None]:
    """Wait until no other command makes statistics in the folder: runs that start together want the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
