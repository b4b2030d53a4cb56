"""Which runs survive: a test of two methods at one rate, and the edge, the rate that half of the runs survive.

The edge is the geometric mean, over seeds, of the rate at which each begins to fail (Spearman's and Kärber's estimate),
which is the rate that half survives if seeds spread evenly around it. Its interval, and that of the ratio of two edges
over pairs of the same seed, are the smoothed bootstrap of `intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Literal

import torch

from .intervals import CONFIDENCE, Estimate, bootstrap_interval, mean_interval, proportion_interval, rate_sensitivity

PAIRED_FROM = 6
"""Fewer pairs cannot make a paired test significant: that of five has p = 0.06 at best."""

COARSE, FINE, PARTLY = 1.5, 1.15, 2
"""Where survival changes, neighbouring rates are at most COARSE times apart; or FINE, as long as only some of the seeds
survive fewer than PARTLY rates: rates must lie close beside the spread of the seeds."""
REACH = 16.0
"""How far beyond the first rates the search goes."""
TINY = 1e-9

Bound = Literal["at least", "at most"]
Larger = Literal["larger", "smaller", "no difference shown", "cannot be told"]


@dataclass(frozen=True)
class Survival:
    """How many runs of a method survived and how many of the baseline, of the same seeds, and the p of a test."""

    survived: int
    baseline: int
    of: int
    p: float
    test: str

    @property
    def verdict(self) -> Literal["survives more", "survives less"] | None:
        """None where no difference is shown."""
        if self.p > 1 - CONFIDENCE:
            return None
        return "survives more" if self.survived > self.baseline else "survives less"

    def sentence(self, label: str, baseline: str) -> str:
        shown = {"survives more": "more often", "survives less": "less often", None: "not shown to differ"}[
            self.verdict
        ]
        counts = f"{self.survived} of {self.of} runs of {label} survive and {self.baseline} of {self.of} of {baseline}"
        return f"{counts}: {shown} ({self.test}, p = {self.p:.2g})."


def compare_survival(method: Sequence[bool], baseline: Sequence[bool]) -> Survival:
    """Runs that are paired by position: Fisher's exact test, or from six pairs the sign test of those that differ.

    >>> found = compare_survival([True] * 4, [False] * 4)
    >>> round(found.p, 3), found.verdict
    (0.029, 'survives more')
    """
    from scipy.stats import binomtest, fisher_exact  # Takes most of a second to import.

    pairs = list(zip(method, baseline, strict=True))
    ours, theirs, of = sum(method), sum(baseline), len(pairs)
    if of >= PAIRED_FROM:
        more, fewer = sum(m and not b for m, b in pairs), sum(b and not m for m, b in pairs)
        p = float(binomtest(more, more + fewer).pvalue) if more + fewer else 1.0
        return Survival(ours, theirs, of, p, "sign test of pairs")
    p = float(fisher_exact([[ours, of - ours], [theirs, of - theirs]])[1])  # pyright: ignore[reportArgumentType]
    return Survival(ours, theirs, of, p, "Fisher's exact test")


@dataclass(frozen=True)
class RateTable:
    """The runs of a method: a row for each rate, going up, with the same seeds in each. Losses are the last ones."""

    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    survived: tuple[tuple[bool, ...], ...]
    losses: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        rows = len(self.rates) == len(self.survived) == len(self.losses)
        if not rows or any(later <= earlier for earlier, later in pairwise(self.rates)) or not self.rates:
            raise ValueError(f"a table of rates has a row for each rate, going up, not {self.rates}")

    @property
    def counts(self) -> list[int]:
        return [sum(row) for row in self.survived]

    @property
    def upper(self) -> RateTable:
        """From the lowest of the rates that most seeds survive: runs that fail below it lack steps, not stability."""
        start = self.counts.index(max(self.counts))
        return RateTable(self.seeds, self.rates[start:], self.survived[start:], self.losses[start:])

    @property
    def shares(self) -> list[tuple[float, float]]:
        """Wilson's interval of the share that survives, for each rate."""
        return [proportion_interval(sum(row), len(row)) for row in self.survived]

    @property
    def safe_rate(self) -> float | None:
        """The largest rate up to which every run survived."""
        whole = list(takewhile(lambda row: all(row[1]), zip(self.upper.rates, self.upper.survived, strict=True)))
        return whole[-1][0] if whole else None

    @property
    def best(self) -> tuple[float, Estimate] | None:
        """The rate with the lowest mean loss among those that every run survived, and that loss."""
        rows = zip(self.rates, self.survived, self.losses, strict=True)
        found = [(rate, mean_interval(losses)) for rate, survived, losses in rows if all(survived)]
        known = [(loss.value, rate, loss) for rate, loss in found if loss.value is not None]
        return min(known)[1:] if known else None

    def thresholds(self) -> list[float]:
        """The logarithm of the rate at which each seed begins to fail: in the middle between two rates, and where it
        fails and survives by turns as far up as it survives in all."""
        logs = [math.log(rate) for rate in self.upper.rates]
        cells = list(zip(pairwise(logs), pairwise(self.upper.survived), strict=True))
        places = range(len(self.seeds))
        return [logs[0] + sum((b - a) * (x[k] + y[k]) / 2 for (a, b), (x, y) in cells) for k in places]

    @property
    def bound(self) -> Bound | None:
        """What the edge found is to the true one, where the rates do not reach far enough."""
        above, below = any(self.survived[-1]), not all(self.upper.survived[0])
        return None if above == below else "at least" if above else "at most"

    @property
    def edge(self) -> Edge:
        reaches = 2 * max(self.counts) >= len(self.seeds) >= 2 * self.counts[-1]
        return edge_of(self.thresholds(), self.bound, self.resolution) if reaches else Edge(None, bound=self.bound)

    @property
    def resolution(self) -> float:
        """Half the logarithm of the ratio of neighbouring rates between which survival changes, where it is widest."""
        cells = zip(pairwise(self.upper.rates), pairwise(self.upper.survived), strict=True)
        return max((math.log(b / a) / 2 for (a, b), (x, y) in cells if x != y), default=0.0)

    def sensitivity(self, rates: Sequence[float], untrained: float) -> Estimate:
        """Over some of the rates: the mean of min(loss, untrained loss), minus the best (Wortsman et al. 2023)."""
        kept = [losses for rate, losses in zip(self.rates, self.losses, strict=True) if rate in rates]
        return rate_sensitivity(rates, kept, untrained) if len(kept) == len(rates) > 1 else Estimate(None)


@dataclass(frozen=True)
class Edge(Estimate):
    """A rate, or a ratio of two, with its interval; `bound` as for a table."""

    bound: Bound | None = None

    @property
    def verdict(self) -> Larger:
        """Of a ratio: only an interval without 1 says larger or smaller."""
        if self.low is None or self.high is None:
            return "cannot be told"
        return "larger" if self.low > 1 + TINY else "smaller" if self.high < 1 - TINY else "no difference shown"


def edge_of(logs: Sequence[float], bound: Bound | None, resolution: float) -> Edge:
    """The geometric mean of numbers with these logarithms, and its interval; none for a single one.

    Where all are equal, the interval is what the rates cannot tell apart.
    """
    x = torch.tensor(logs, dtype=torch.float64)
    value = x.mean().exp().item()
    if len(logs) < 2:
        return Edge(value, bound=bound)
    if x.max() - x.min() < TINY:
        return Edge(value, value * math.exp(-resolution), value * math.exp(resolution), bound)
    low, high = bootstrap_interval(x)
    return Edge(value, low.exp().item(), high.exp().item(), bound)


def edge_ratio(method: RateTable, baseline: RateTable) -> Edge:
    """The edge of a method over that of the baseline, by pairs of the same seed."""
    ours, theirs = (dict(zip(table.seeds, table.thresholds(), strict=True)) for table in (method, baseline))
    pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if method.edge.value is None or baseline.edge.value is None or not pairs:
        return Edge(None)
    above = method.bound == "at least" or baseline.bound == "at most"
    below = method.bound == "at most" or baseline.bound == "at least"
    bound: Bound | None = None if above == below else "at least" if above else "at most"
    return edge_of(pairs, bound, method.resolution + baseline.resolution)


def next_rates(rates: Sequence[float], counts: Sequence[int], of: int, first: Sequence[float]) -> list[float]:
    """Where to look next, by how many of the seeds survived each rate; nothing once the edge is known well enough.

    Up until no seed survives; down until all do, or until fewer do, for lack of steps; and between neighbours where the
    number changes.

    >>> next_rates([0.001, 0.002, 0.004], [8, 8, 0], 8, [0.001, 0.002, 0.004])
    [0.00283]
    >>> next_rates([0.001, 0.002], [8, 8], 8, [0.001, 0.002])
    [0.004]
    """
    partly, start = sum(0 < count < of for count in counts), counts.index(max(counts))
    widest = COARSE if partly >= PARTLY else FINE
    cells = zip(pairwise(rates[start:]), pairwise(counts[start:]), strict=True)
    found = [math.sqrt(a * b) for (a, b), (x, y) in cells if x != y and b / a > widest]
    if start == 0 and counts[0] < of and rates[0] > min(first) / REACH * 1.01:
        found.append(rates[0] / 2)
    if counts[-1] > 0 and rates[-1] < max(first) * REACH * 0.99:
        found.append(rates[-1] * 2)
    return sorted({float(f"{rate:.3g}") for rate in found} - {*rates})
