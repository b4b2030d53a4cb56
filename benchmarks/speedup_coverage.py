"""Does the interval of a speed-up hold the true one as often as it says? On synthetic runs whose speed-up is known.

    python benchmarks/speedup_coverage.py                      # 1000 repetitions of each setting, one CPU minute
    python benchmarks/speedup_coverage.py --repetitions 10000 --seed 1 --seeds 5 20

Prints two Markdown tables. The first has, for each kind of noise, true speed-up and number of seeds: how often the 95 %
interval covers the truth, how often the verdict is "faster", and how wide the interval is (median of high / low). The
second has the coverage for speed-ups that are skewed over seeds, and that of Student's and the percentile interval.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from scalelong.compare.intervals import bootstrap_interval, student_quantile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "compare"))
from synthetic_runs import NOISES, Setting, measure_rates

SPEEDUPS = (0.7, 1.0, 1.5, 2.5)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    print_coverage(options)
    print()
    print_skewed(options)


def print_coverage(options: argparse.Namespace) -> None:
    print_row("noise", "true speed-up", *(f"{seeds} seeds: covered, faster, width" for seeds in options.seeds))
    print_row(*["---"] * (2 + len(options.seeds)))
    for (name, noise), speedup in product(NOISES.items(), SPEEDUPS):
        settings = [Setting(speedup, seeds, **noise) for seeds in options.seeds]
        print_row(name, speedup, *(cell(setting, options.repetitions, options.seed) for setting in settings))


def print_skewed(options: argparse.Namespace) -> None:
    print_row("skewed over seeds", *(f"{seeds} seeds" for seeds in options.seeds))
    print_row(*["---"] * (1 + len(options.seeds)))
    for method in (bootstrap_interval, student_interval, percentile_interval):
        covered = [skewed_coverage(method, seeds, options.repetitions, options.seed) for seeds in options.seeds]
        print_row(method.__name__, *(f"{100 * share:.1f} %" for share in covered))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5, 8], help="numbers of pairs of runs")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    return parser.parse_args()


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def cell(setting: Setting, repetitions: int, seed: int) -> str:
    rates = measure_rates(setting, repetitions, seed)
    return f"{100 * rates.covered:.1f} %, {100 * rates.faster:.1f} %, {rates.width:.2f}×"


def skewed_coverage(method, seeds: int, repetitions: int, seed: int) -> float:
    """Of the mean of exponential numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = -torch.rand(repetitions, seeds, generator=generator, dtype=torch.float64).log()
    low, high = method(x)
    return ((low <= 1) & (high >= 1)).double().mean().item()


def student_interval(x: Tensor) -> tuple[Tensor, Tensor]:
    half = student_quantile(0.95, x.shape[1] - 1) * x.std(1) / math.sqrt(x.shape[1])
    return x.mean(1) - half, x.mean(1) + half


def percentile_interval(x: Tensor, draws: int = 1000) -> Iterable[Tensor]:
    index = torch.randint(x.shape[1], (draws, x.shape[1]), generator=torch.Generator().manual_seed(0))
    return x[:, index].mean(-1).quantile(torch.tensor([0.025, 0.975], dtype=x.dtype), dim=1)


if __name__ == "__main__":
    main()
