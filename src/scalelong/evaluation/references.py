"""Reference statistics of a dataset, built once and found again by the content of its images."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..data import DataConfig, Progress
from ..data.broken import BrokenImages
from ..data.facts import short_hash
from ..data.images import choose_rows, decode_plan, narrow, plan_rows, spread
from ..data.prepare import WHOLE, Share
from ..data.tables import Table
from .blocks import BLOCK, Blocks
from .features import FeatureNetwork, hash_of_images
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
    facts: Facts = {**network_facts(network), "data": pictures.content()}
    path = folder / f"{Path(data.source).stem.replace(':', '-')}-{Path(network.name).stem}-{short_hash(facts)}.npz"
    if path.is_file():
        load_reference(path)
        return path if share.rank == 0 else None

    def make(start: int, stop: int) -> Tensor:
        return network(pictures.read(start, stop))

    blocks = path.with_suffix(".blocks")
    features = Blocks(blocks, facts, len(pictures), make, progress).compute(share)
    if features is None:
        return None
    kept = shuffled(features)[:KEPT]
    save_reference(path, Reference(statistics_of(features), facts, kept))
    shutil.rmtree(blocks)
    return path
