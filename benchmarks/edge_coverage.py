"""Do the intervals of an edge, and of the ratio of two, hold the true one as often as they say? On synthetic searches.

    python benchmarks/edge_coverage.py                     # 1000 searches of each setting, about eight CPU minutes
    python benchmarks/edge_coverage.py --repetitions 200 --seed 1

Prints a Markdown table: for each spread of the seeds (in octaves of the rate), number of seeds and true ratio, how
often the 95 % interval covers the edge and the ratio, how often the verdict is "larger", how wide the interval of the
ratio is (median of high / low), and how many rates are tried for both methods. The last rows have skewed seeds.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "compare"))
from synthetic_edges import Setting, measure_rates

SPREADS, SEEDS, RATIOS = (0.2, 0.5, 0.8), (4, 8, 12), (1.0, 1.5, 2.0)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    print_row("spread", "seeds", "true ratio", "edge covered", "ratio covered", "“larger”", "width", "rates")
    print_row(*["---"] * 8)
    for spread, seeds, ratio in product(SPREADS, SEEDS, RATIOS):
        print_setting(f"{spread}", Setting(ratio, seeds, spread), options)
    for ratio in RATIOS:
        print_setting("0.5, skewed", Setting(ratio, 8, 0.5, skewed=True), options)


def print_setting(name: str, setting: Setting, options: argparse.Namespace) -> None:
    found = measure_rates(setting, options.repetitions, options.seed)
    shares = (f"{100 * share:.1f} %" for share in (found.edge, found.ratio, found.larger))
    print_row(name, setting.seeds, setting.ratio, *shares, f"{found.width:.2f}×", f"{found.runs:.1f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    return parser.parse_args()


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
