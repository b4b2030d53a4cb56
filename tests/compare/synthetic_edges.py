"""Searches for an edge that is known: each seed has a rate of its own at which training begins to fail."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.compare.survival import Edge, RateTable, edge_ratio, next_rates

FIRST = (0.001, 0.002, 0.004, 0.008, 0.016)
EDGE = 0.004


@dataclass(frozen=True)
class Setting:
    """Standard deviations are of the logarithm to base 2 of the rate."""

    ratio: float = 1.0
    seeds: int = 8
    spread: float = 0.5
    """Of the rates at which the seeds of a method begin to fail."""
    shared: float = 0.7
    """The part of its variance that two methods share."""
    noise: float = 0.1
    """Of each run by itself, so that a seed may fail at one rate and survive a larger one."""
    skewed: bool = False


@dataclass(frozen=True)
class Rates:
    """How often, over the repetitions, the intervals cover the truth and what the verdict is."""

    edge: float
    ratio: float
    larger: float
    smaller: float
    width: float
    """Median of high / low, of the ratio."""
    runs: float
    """Of both methods, per seed."""


def search(thresholds: Tensor, setting: Setting, generator: torch.Generator) -> RateTable:
    """The table that a search ends with. Shape: (n,), in octaves."""
    rows: dict[float, tuple[bool, ...]] = {}
    wanted = list(FIRST)
    while wanted:
        for rate in wanted:
            own = thresholds + setting.noise * torch.randn(len(thresholds), generator=generator, dtype=torch.float64)
            rows[rate] = tuple((own > math.log2(rate)).tolist())
        rates = sorted(rows)
        wanted = next_rates(rates, [sum(rows[rate]) for rate in rates], len(thresholds), FIRST)
    rates = sorted(rows)
    losses = tuple(tuple(0.1 if survived else 1.0 for survived in rows[rate]) for rate in rates)
    return RateTable(tuple(range(len(thresholds))), tuple(rates), tuple(rows[rate] for rate in rates), losses)


def draw(setting: Setting, generator: torch.Generator) -> Tensor:
    """Deviations of one median or mean 0. Shape: (n,)."""
    x = torch.randn(setting.seeds, generator=generator, dtype=torch.float64)
    # As far from symmetric as a lognormal with half the logarithm's spread, about its median.
    return ((0.5 * x).exp() - 1) / 0.6 if setting.skewed else x


def measure_rates(setting: Setting, repetitions: int, seed: int = 0) -> Rates:
    """Repeat a search for a baseline and a method, and count."""
    generator, counts, widths, runs = torch.Generator().manual_seed(seed), torch.zeros(4), [], 0
    for _ in range(repetitions):
        # Where the edge lies between the first rates is a matter of luck.
        edge = EDGE * 2 ** (torch.rand(1, generator=generator).item() - 0.5)
        shared = draw(setting, generator) * math.sqrt(setting.shared)
        own = [draw(setting, generator) * math.sqrt(1 - setting.shared) for _ in range(2)]
        middles = [math.log2(edge), math.log2(edge * setting.ratio)]
        base, method = (
            search(middle + setting.spread * (shared + part), setting, generator)
            for middle, part in zip(middles, own, strict=True)
        )
        ratio = edge_ratio(method, base)
        larger, smaller = ratio.verdict == "larger", ratio.verdict == "smaller"
        counts += torch.tensor([covers(base.edge, edge), covers(ratio, setting.ratio), larger, smaller])
        widths.append((ratio.high or math.inf) / (ratio.low or 1.0))
        runs += len(base.rates) + len(method.rates)
    return Rates(*(counts / repetitions).tolist(), float(torch.tensor(widths).median()), runs / repetitions)


def covers(found: Edge, truth: float) -> bool:
    return found.low is not None and found.high is not None and found.low <= truth <= found.high
