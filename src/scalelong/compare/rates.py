"""How much the choice of the learning rate matters (Wortsman et al. 2023, arXiv:2309.14322)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from .intervals import CONFIDENCE, Estimate, mean_interval


def rate_sensitivity(
    rates: Sequence[float], losses: Sequence[Sequence[float]], initial_loss: float, confidence: float = CONFIDENCE
) -> Estimate:
    """The loss that one gives away, on average over the rates, by not knowing the best; the interval is over seeds.

    It is the mean over rates of min(loss, loss at initialisation), minus the best of them.
    `losses` holds, for each rate, one loss for each seed; a run that diverged counts as the loss at initialisation.

    >>> rate_sensitivity([1e-3, 2e-3, 4e-3], [[0.5], [0.25], [math.inf]], initial_loss=1.0)
    Estimate(value=0.33..., low=None, high=None)
    """
    check_table(rates, losses)
    # A loss that is not a number compares as false, and so counts as that at initialisation.
    capped = ([loss if loss < initial_loss else initial_loss for loss in of_rate] for of_rate in losses)
    sweeps = zip(*capped, strict=True)
    found = mean_interval([fmean(sweep) - min(sweep) for sweep in sweeps], confidence)
    return Estimate(found.value, None if found.low is None else max(0.0, found.low), found.high)


def largest_stable_rate(
    rates: Sequence[float], losses: Sequence[Sequence[float]], initial_loss: float, tolerance: float = 0.1
) -> float | None:
    """The last rate, going up from the best one, before a run diverges or the loss is no longer near the best.

    Near is within a tolerance of what training gains: mean loss ≤ best + tolerance · (loss at initialisation − best).
    None if a run diverged at every rate, or none came below the loss at initialisation.

    >>> largest_stable_rate([1e-3, 2e-3, 4e-3], [[0.5], [0.25], [math.inf]], initial_loss=1.0)
    0.002
    """
    check_table(rates, losses)
    means = {
        rate: fmean(of_rate) for rate, of_rate in zip(rates, losses, strict=True) if all(map(math.isfinite, of_rate))
    }
    if not means or min(means.values()) >= initial_loss:
        return None
    best = min(means, key=lambda rate: means[rate])
    limit = means[best] + tolerance * (initial_loss - means[best])
    stable = best
    for rate in sorted(rate for rate in rates if rate > best):
        if means.get(rate, math.inf) > limit:
            break
        stable = rate
    return stable


def check_table(rates: Sequence[float], losses: Sequence[Sequence[float]]) -> None:
    seeds = {len(of_rate) for of_rate in losses}
    if len(rates) != len(losses) or len(seeds) != 1 or 0 in seeds or len(set(rates)) != len(rates):
        counts = [len(of_rate) for of_rate in losses]
        raise ValueError(f"each rate needs a loss for every seed: there are {len(rates)} rates and {counts} losses")
