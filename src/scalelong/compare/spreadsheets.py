"""results.csv, one row for each run, and curves.csv, one row for each number of a curve."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..utils.atomic import atomic_write

OF_ARM = ("id", "label", "method", "lr", "depth", "batch")
OF_RUN = ("seed", "status", "step", "seconds", "seconds_per_step", "final_loss", "final_fd", "message", "folder")
CURVES = ("arm", "seed", "curve", "step", "value")


def write_spreadsheets(folder: Path, results: Mapping[str, Any]) -> None:
    write_rows(folder / "results.csv", ("arm", *OF_ARM[1:], *OF_RUN), run_rows(results))
    write_rows(folder / "curves.csv", CURVES, curve_rows(results))


def write_rows(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(header), *rows])

    atomic_write(path, write)


def run_rows(results: Mapping[str, Any]) -> Iterator[list[Any]]:
    for arm in results["arms"]:
        for run in arm["runs"]:
            yield [*(arm[key] for key in OF_ARM), *(run[key] for key in OF_RUN)]


def curve_rows(results: Mapping[str, Any]) -> Iterator[list[Any]]:
    for arm in results["arms"]:
        seeds = [run["seed"] for run in arm["runs"]]
        for name in ("loss_curve", "fd_curve"):
            curve = arm[name]
            for seed, values in zip(seeds, curve["runs"] if curve else [], strict=False):
                yield from (
                    [arm["id"], seed, curve.get("name", "validation loss"), step, value]
                    for step, value in zip(curve["steps"], values, strict=True)
                    if value is not None
                )
