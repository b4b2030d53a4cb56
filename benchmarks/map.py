"""Draw the map of the edge: where scaling the skips lets training survive a larger rate, and where it does not.

    python benchmarks/map.py run --data cifar10=../shared/data/cifar10    # hours; resumes, and skips what is done
    python benchmarks/map.py list                                        # what is done, and what is not run

A unit of work is one method in one cell: the search of `scalelong edge` for its edge. What it found is a small file of
docs/results/map: the seeds, the learning rates, which runs survived and their final validation losses.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from scalelong.compare.collect import collect
from scalelong.compare.grid import PlannedRun, write_json
from scalelong.compare.run import Display
from scalelong.compare.search import find_edges, make_search, rates_in
from scalelong.compare.survival import RateTable
from scalelong.compare.sweeps import table_of

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "map"
SEEDS, FIRST_SEED = 8, 300  # Seeds that chose no setting.
# Only what the map needs is written, and a run is saved at its end.
QUIET = ("training.sample_every=null", "training.monitor_every=null", "training.checkpoint_every=100000")
VALIDATION = ("training.steps=400", "training.validate_every=40", "data.validation_count=128")
LOW, MIDDLE, HIGH = (4e-3, 8e-3), (8e-3, 1.6e-2), (1.6e-2, 3.2e-2)  # Where a search begins.


@dataclass(frozen=True)
class Cell:
    """A setting of a recipe, and the learning rates that the searches in it begin with."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    rates: tuple[float, ...] = HIGH
    data: str = ""
    """The name under which `--data` gives the images; that of the recipe if empty."""


@dataclass(frozen=True)
class Unit:
    """One method in one cell."""

    cell: Cell
    method: str

    @property
    def file(self) -> Path:
        return RESULTS / self.cell.name / f"{self.method.replace(':', '-').replace('=', '')}.json"


def scales(recipe: str, *stds: float) -> list[Cell]:
    """Initial scales: 0.0653 is that of U-ViT-S/2 at width 48, 0.083 that of torch's default linear layer."""
    near = [HIGH if 0.07 < std < 0.12 else MIDDLE for std in stds]
    cells = zip(stds, near, strict=True)
    return [Cell(f"{recipe}-std{std:g}", recipe, (f"model.init_std={std!r}",), rates) for std, rates in cells]


def depths(recipe: str, *blocks: int) -> list[Cell]:
    """Depths besides 20, the recipe's."""
    near = [HIGH if depth < 20 else MIDDLE for depth in blocks]
    cells = zip(blocks, near, strict=True)
    return [Cell(f"{recipe}-depth{depth}", recipe, (f"model.depth={depth}",), rates) for depth, rates in cells]


def cure(name: str, *overrides: str) -> list[Cell]:
    """Another cure in two cells: the recipe's initial scale, and torch's."""
    torchs = (*overrides, "model.init_std=0.083")
    return [Cell(f"{DEEP}-{name}", DEEP, overrides), Cell(f"{DEEP}-{name}-std0.083", DEEP, torchs)]


def long(std: float) -> Cell:
    steps = ("training.steps=3000", "training.validate_every=300", "optim.warmup_steps=100")
    return Cell(f"{DEEP}-steps3000-std{std:g}", DEEP, (*steps, f"model.init_std={std!r}"), LOW)


def width(dim: int, scale: str, std: float, rates: tuple[float, ...]) -> Cell:
    """A wider network at U-ViT-S/2's initial scale, 0.02·√(512/dim), or at torch's, √(1/(3·dim))."""
    return Cell(f"{DEEP}-width{dim}-{scale}", DEEP, (f"model.embed_dim={dim}", f"model.init_std={std!r}"), rates)


def unet(name: str, *overrides: str) -> Cell:
    """diffusers' UNet with nine skips, at 16 pixels and with the optimiser of the others."""
    small = ("data.image_size=16", "model.sample_size=16", "model.attention=[4]", "training.batch_size=16")
    optim = ("optim.warmup_steps=20", "optim.clip_norm=null", "optim.ema_decay=0.95", "training.precision=fp32")
    return Cell(name, "cifar10-tiny-unet", (*small, *optim, *overrides), MIDDLE)


DEEP, DIGITS = "cifar10-deep", "digits-deep"
SIX, MORE = (0.0653, 0.1, 0.04, 0.14, 0.083, 0.02), (0.2, 0.03)
FACES = ("data.source=nielsr/CelebA-faces", "data.image_column=image", "data.validation_split=null")
FLICKR = ("data.source=data/flickr8k64", "data.image_column=image")
PIXELS = ("data.image_size=32", "model.img_size=32", "model.patch_size=8")

# Cells and their methods, the most telling first.
ORDER: list[tuple[list[Cell], str]] = [
    # What must be there.
    (scales(DEEP, *SIX), "none cs"),
    (depths(DEEP, 8, 12, 32), "none cs"),
    (cure("beta2-0.95", "optim.betas=[0.9,0.95]"), "none cs"),
    (cure("clip1", "optim.clip_norm=1.0"), "none cs"),
    (scales(DEEP, *SIX), "ls"),
    (depths(DEEP, 8, 12, 32), "ls"),
    (scales(DEEP, *SIX), "uniform cs-reversed"),
    (cure("qk-norm", "model.qk_norm=true"), "none cs"),
    (cure("skip-norm", "model.skip_norm=true"), "none cs"),
    (cure("adagc", "optim.adaptive_clip=1.05", "optim.clip_norm=1.0"), "none cs"),
    (cure("cosine", "optim.schedule=cosine"), "none cs"),
    (cure("beta2-0.99", "optim.betas=[0.9,0.99]"), "none cs"),
    (cure("warmup100", "optim.warmup_steps=100"), "none cs"),
    # At EDM2's own balance of 0.5 the join is the plain one, as trunk and skip are equally wide.
    (cure("balance0.3", "model.concat_balance=0.3"), "none cs"),
    ([long(0.0653), long(0.083), long(0.1)], "none cs"),
    (scales(DIGITS, *SIX), "none cs ls"),
    (depths(DIGITS, 8, 12, 32), "none cs ls"),
    # What fits besides.
    ([unet("cifar10-unet")], "none cs:where=input cs:where=after-norm ls"),
    ([width(96, "s2", 0.0462, MIDDLE), width(96, "torch", 0.0589, MIDDLE)], "none cs"),
    ([width(192, "s2", 0.0327, LOW), width(192, "torch", 0.0417, LOW)], "none cs"),
    (
        [Cell("faces-deep", DEEP, FACES, MIDDLE, "faces"), Cell("flickr-deep", DEEP, FLICKR, MIDDLE, "flickr")],
        "none cs",
    ),
    ([Cell(f"{DEEP}-32px", DEEP, PIXELS, MIDDLE)], "none cs"),
    ([Cell(f"{DEEP}-batch{size}", DEEP, (f"training.batch_size={size}",), MIDDLE) for size in (4, 64)], "none cs"),
    (scales(DIGITS, *SIX), "uniform cs-reversed"),
    (scales(DEEP, *MORE), "none cs ls uniform cs-reversed"),
]


def units() -> list[Unit]:
    return [Unit(cell, method) for cells, methods in ORDER for cell in cells for method in methods.split()]


def run_unit(unit: Unit, folder: Path, sources: dict[str, str], workers: int) -> bool:
    """Find the edge of one method in one cell and write what was found; false if it was told to stop."""
    cell = unit.cell
    source = sources.get(cell.data or cell.recipe.partition("-")[0])
    data = () if source is None else (f"data.source={source}",)
    overrides = (*VALIDATION, *QUIET, f"seed={FIRST_SEED}", *cell.overrides)
    search = make_search(cell.recipe, [unit.method], seeds=SEEDS, rates=cell.rates, overrides=(*overrides, *data))
    began = time.monotonic()
    result = find_edges(search, folder, workers=workers, display=Lines())
    if result.signal is not None or result.failures:
        print(f"{cell.name} {unit.method}: broke off", *result.failures.items(), sep="\n  ", flush=True)
        return False
    plan = search.plan(rates_in(folder))
    records = {arm.id: [collect(folder, PlannedRun(arm, seed)) for seed in plan.seeds] for arm in plan.arms}
    table = table_of(plan.arms, records)
    assert table is not None, "a search that ended has runs at two rates or more"
    write_unit(unit, table, overrides, steps=plan.steps, minutes=(time.monotonic() - began) * workers / 60)
    shutil.rmtree(folder / "runs")
    return True


def write_unit(unit: Unit, table: RateTable, overrides: Sequence[str], *, steps: int, minutes: float) -> None:
    unit.file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "cell": unit.cell.name,
        "method": unit.method,
        "recipe": unit.cell.recipe,
        "overrides": list(overrides),
        "steps": steps,
        "seeds": table.seeds,
        "rates": table.rates,
        "survived": [[int(one) for one in row] for row in table.survived],
        "losses": [[float(f"{loss:.5g}") for loss in row] for row in table.losses],
        "worker_minutes": round(minutes, 1),
        "commit": commit(),
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    write_json(unit.file, content)


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


class Lines(Display):
    """What a log file should say."""

    def info(self, message: str) -> None:
        print(f"  {message}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "list"])
    parser.add_argument(
        "--data", action="append", default=[], metavar="NAME=PATH", help="where a data set is, if not on the hub"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/map"), help="for the runs, which are removed when a unit is done"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="cells whose name contains this")
    arguments = parser.parse_args()
    chosen = [unit for unit in units() if arguments.only in unit.cell.name]
    if arguments.what == "list":
        for unit in chosen:
            print(f"{'done   ' if unit.file.is_file() else 'not run'}  {unit.cell.name}  {unit.method}")
        return 0
    sources = dict(text.split("=", 1) for text in arguments.data)
    for unit in chosen:
        if not unit.file.is_file():
            print(f"{datetime.now():%H:%M:%S} {unit.cell.name} {unit.method}", flush=True)
            if not run_unit(unit, arguments.out / unit.cell.name / unit.file.stem, sources, arguments.workers):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
