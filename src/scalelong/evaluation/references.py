"""Reference statistics of a dataset, built once and found again by the content of its images."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..data import DataConfig, Progress
from ..data.broken import BrokenImages
from ..data.facts import short_hash
from ..data.images import choose_rows, decode_plan, narrow, plan_rows, spread
from ..data.prepare import WHOLE, Share
from ..data.tables import Table
from ..training.run import fcntl
from ..training.sample_folder import wait_until
from .blocks import BLOCK, Blocks
from .feature_network import FeatureNetwork, hash_of_images
from .metrics import shuffled
from .statistics import Facts, Reference, load_reference, save_reference, statistics_of

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

    def read(self, start: int, stop: int, broken: BrokenImages | None = None) -> Tensor:
        """Those that can be read. Shape: (B, C, H, W), uint8."""
        plan = plan_rows(self.table, self.rows[start:stop], self.config, None)
        return decode_plan(plan, self.config, broken or BrokenImages(self.config.source)).images

    def content(self) -> str:
        """A hash of their pixels; raises DataError if more than 1 % cannot be read."""
        broken = BrokenImages(self.config.source)
        parts = (self.read(start, start + BLOCK, broken) for start in range(0, len(self), BLOCK))
        digest = hash_of_images(parts)
        broken.check(len(self))
        broken.report(len(self))
        return digest[:16]


def open_pictures(data: DataConfig, images: int | None = None) -> Pictures:
    """The images that a recipe trains on; `images` of them, if given."""
    used = data.model_copy(update={"label_column": None, "caption_column": None})
    table, rows = choose_rows(used)[0]
    if images is not None:
        if not 2 <= images <= len(rows):
            raise ValueError(f"there are {len(rows)} images to take statistics of, so --images is 2 to {len(rows)}")
        rows = [rows[place] for place in spread(len(rows), images)]
    return Pictures(narrow(table, used), rows, used)


def network_facts(network: FeatureNetwork) -> Facts:
    return {"network": network.name, "weights": network.weights, "resize": network.resize}


def build_reference(
    data: DataConfig,
    network: FeatureNetwork,
    *,
    images: int | None = None,
    folder: Path = FOLDER,
    share: Share = WHOLE,
    progress: Progress | None = None,
) -> Path | None:
    """The file of a dataset's statistics, made if it is not there; None in processes that are not the first."""
    pictures = open_pictures(data, images)
    facts = facts_of(pictures, network)
    path = folder / file_name(data, network, facts)
    if path.is_file():
        load_reference(path)
        return path if share.rank == 0 else None
    return fill_reference(path, pictures, facts, network, share, progress)


def await_reference(
    data: DataConfig, network: FeatureNetwork, share: Share = WHOLE, *, folder: Path = FOLDER
) -> Reference:
    """A dataset's statistics in every process, made by all of them if they are not there."""
    pictures = open_pictures(data)
    facts = facts_of(pictures, network)
    path = folder / file_name(data, network, facts)
    if not path.is_file():
        fill_reference(path, pictures, facts, network, share)
    wait_until(path.is_file)
    return load_reference(path)


def facts_of(pictures: Pictures, network: FeatureNetwork) -> Facts:
    return {**network_facts(network), "data": pictures.content()}


def file_name(data: DataConfig, network: FeatureNetwork, facts: Facts) -> str:
    return f"{Path(data.source).stem.replace(':', '-')}-{Path(network.name).stem}-{short_hash(facts)}.npz"


def fill_reference(
    path: Path,
    pictures: Pictures,
    facts: Facts,
    network: FeatureNetwork,
    share: Share,
    progress: Progress | None = None,
) -> Path | None:
    """Compute a dataset's statistics; returns the file in the first process."""

    def make(start: int, stop: int) -> Tensor:
        return network(pictures.read(start, stop))

    blocks = Blocks(path.with_suffix(".blocks"), facts, len(pictures), make, progress)
    if share.rank:
        help_with(blocks, share, path)
        return None
    with turn_in(path.parent):
        # Else another command made it in the meantime.
        if not path.is_file() and (features := blocks.compute(share)) is not None:
            save_reference(path, Reference(statistics_of(features), facts, shuffled(features)[:KEPT]))
            shutil.rmtree(blocks.folder, ignore_errors=True)
    return path


def help_with(blocks: Blocks, share: Share, path: Path) -> None:
    """Compute this process's blocks, unless another command has made the file and removed them meanwhile."""
    try:
        blocks.compute(share)
    except FileNotFoundError:
        if not path.is_file():
            raise


@contextmanager
def turn_in(folder: Path) -> Iterator[None]:
    """Wait until no other command makes statistics in the folder: runs that start together want the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
