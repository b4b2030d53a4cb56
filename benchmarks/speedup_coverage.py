"""Does the interval of a speed-up hold the true one as often as it says? On synthetic runs whose speed-up is known.

    python benchmarks/speedup_coverage.py                      # 1000 repetitions of each setting, about two minutes
    python benchmarks/speedup_coverage.py --repetitions 10000 --seed 1

Prints a Markdown table: for each kind of noise, true speed-up and number of seeds, how often the 95 % interval covers
the truth, how often the verdict is "faster" and "slower", and how wide the interval is (median of high / low).
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "comparison"))
from synthetic_runs import NOISES, Setting, measure_rates

SPEEDUPS = (0.7, 1.0, 1.5, 2.5)
SEEDS = (3, 5, 8)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    print("| noise | speed-up | seeds | covered | faster | slower | high / low |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (name, noise), speedup, seeds in product(NOISES.items(), SPEEDUPS, SEEDS):
        rates = measure_rates(Setting(speedup, seeds, **noise), options.repetitions, options.seed)
        shares = " | ".join(f"{100 * share:.1f} %" for share in (rates.covered, rates.faster, rates.slower))
        print(f"| {name} | {speedup} | {seeds} | {shares} | {rates.width:.2f} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
