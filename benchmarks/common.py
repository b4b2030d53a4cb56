"""What the benchmarks share."""

from __future__ import annotations

import random
import statistics


def bootstrap_median(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """A 95 % interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]
