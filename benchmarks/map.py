"""Draw the map of the edge: where scaling the skips lets training survive a larger learning rate, and where it does not.

    python benchmarks/map.py run --data cifar10=../shared/data/cifar10    # hours; resumes, and skips what is done
    python benchmarks/map.py list                                        # what is done, and what is not run

A unit of work is one method in one cell: the search of `scalelong edge` for its edge. What it found is one small file of
docs/results/map: the seeds, the learning rates, which runs survived and their final validation losses.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
STDS = (0.0653, 0.1, 0.04, 0.14, 0.083, 0.02, 0.2, 0.03)  # 0.083: torch's default linear layer at width 48.
DEPTHS = (8, 12, 32)  # And 20, which is the recipe's.
TORCH_STD = 0.083


@dataclass(frozen=True)
class Unit:
    """One method in one cell, and the learning rates that its search begins with."""

    cell: str
    method: str
    recipe: str
    overrides: tuple[str, ...]
    rates: tuple[float, ...]

    @property
    def file(self) -> Path:
        return RESULTS / self.cell / f"{self.method.replace(':', '-').replace('=', '')}.json"


def initial_scale(recipe: str, std: float, *methods: str) -> Iterator[Unit]:
    rates = (1.6e-2, 3.2e-2) if 0.07 < std < 0.12 else (8e-3, 1.6e-2)
    for method in methods:
        yield Unit(f"{recipe}-std{std:g}", method, recipe, (f"model.init_std={std!r}",), rates)


def depth(recipe: str, blocks: int, *methods: str) -> Iterator[Unit]:
    rates = (1.6e-2, 3.2e-2) if blocks < 20 else (8e-3, 1.6e-2)
    for method in methods:
        yield Unit(f"{recipe}-depth{blocks}", method, recipe, (f"model.depth={blocks}",), rates)


def cure(recipe: str, name: str, overrides: Sequence[str], *methods: str) -> Iterator[Unit]:
    """Another cure, alone and together with CS, in two cells: the recipe's initial scale, and torch's."""
    for std, where in ((None, ""), (TORCH_STD, f"-std{TORCH_STD:g}")):
        more = () if std is None else (f"model.init_std={std!r}",)
        for method in methods:
            yield Unit(f"{recipe}-{name}{where}", method, recipe, (*overrides, *more), (1.6e-2, 3.2e-2))


def units() -> list[Unit]:
    """All of them, the most telling first."""
    deep, found = "cifar10-deep", []
    for std in STDS[:6]:
        found += initial_scale(deep, std, "none", "cs")
    for blocks in DEPTHS:
        found += depth(deep, blocks, "none", "cs")
    found += cure(deep, "beta2-0.95", ["optim.betas=[0.9,0.95]"], "none", "cs")
    found += cure(deep, "clip1", ["optim.clip_norm=1.0"], "none", "cs")
    for std in STDS[:6]:
        found += initial_scale(deep, std, "ls")
    for blocks in DEPTHS:
        found += depth(deep, blocks, "ls")
    for std in STDS[:6]:
        found += initial_scale(deep, std, "uniform", "cs-reversed")
    found += cure(deep, "beta2-0.99", ["optim.betas=[0.9,0.99]"], "none", "cs")
    found += cure(deep, "warmup100", ["optim.warmup_steps=100"], "none", "cs")
    for std in STDS[6:]:
        found += initial_scale(deep, std, "none", "cs", "ls", "uniform", "cs-reversed")
    for std in STDS[:6]:
        found += initial_scale("digits-deep", std, "none", "cs", "ls", "uniform", "cs-reversed")
    for blocks in DEPTHS:
        found += depth("digits-deep", blocks, "none", "cs", "ls")
    return found


def run_unit(unit: Unit, folder: Path, sources: dict[str, str], workers: int) -> bool:
    """Find the edge of one method in one cell and write what was found; false if it was told to stop."""
    source = sources.get(unit.recipe.partition("-")[0])
    data = () if source is None else (f"data.source={source}",)
    overrides = (*unit.overrides, *VALIDATION, *QUIET, f"seed={FIRST_SEED}")
    search = make_search(unit.recipe, [unit.method], seeds=SEEDS, rates=unit.rates, overrides=(*overrides, *data))
    began = time.monotonic()
    result = find_edges(search, folder, workers=workers, display=Lines())
    if result.signal is not None or result.failures:
        print(f"{unit.cell} {unit.method}: broke off", *result.failures.items(), sep="\n  ", flush=True)
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
        "cell": unit.cell,
        "method": unit.method,
        "recipe": unit.recipe,
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
    chosen = [unit for unit in units() if arguments.only in unit.cell]
    if arguments.what == "list":
        for unit in chosen:
            print(f"{'done   ' if unit.file.is_file() else 'not run'}  {unit.cell}  {unit.method}")
        return 0
    sources = dict(text.split("=", 1) for text in arguments.data)
    for unit in chosen:
        if not unit.file.is_file():
            print(f"{datetime.now():%H:%M:%S} {unit.cell} {unit.method}", flush=True)
            if not run_unit(unit, arguments.out / unit.cell / unit.file.stem, sources, arguments.workers):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
