"""What the speed-ups of a few pairs of runs allow one to say, in a word and in a sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .intervals import CONFIDENCE, bootstrap_interval, student_quantile

Clock = Literal["steps", "seconds"]
Verdict = Literal["faster", "slower", "no difference shown", "cannot be judged"]
Bound = Literal["at least", "at most"]

POWER = 0.8
"""The chance with which the seeds that are advised settle a difference, if it is as large as it seems."""
MOST_SEEDS = 200
"""More of them are not advised."""


@dataclass(frozen=True)
class Speedup:
    """How many times fewer steps or seconds than the baseline: geometric mean over pairs of runs, and its interval."""

    value: float | None
    low: float | None
    high: float | None
    pairs: int
    verdict: Verdict
    more_seeds: int | None = None
    """About how many more pairs would settle it; None if it is settled, or if more than 200 would be needed."""
    clock: Clock = "steps"
    confidence: float = CONFIDENCE
    diverged: int = 0
    """Runs of the method that did; each counts as the slowest that a curve can show."""
    baseline_diverged: int = 0
    early: int = 0
    """Pairs in which the method was there by its first evaluation: it may be faster than its curve can show."""
    baseline_early: int = 0

    @property
    def bound(self) -> Bound | None:
        """What the value is to the true one, where the curves begin too late to show all of it on one side."""
        if bool(self.early) == bool(self.baseline_early):
            return None
        return "at least" if self.early else "at most"

    @property
    def varies(self) -> bool:
        """Whether there is a pair of which the curves show all: the interval says something then."""
        return self.early + self.baseline_early < self.pairs

    def sentence(self, label: str, baseline: str = "the baseline") -> str:
        """What was found, for people.

        >>> print(Speedup(1.52, 1.31, 1.77, 5, "faster").sentence("CS"))
        CS reaches the final validation loss of the baseline in 1.52× fewer steps (95 % interval 1.31 to 1.77, 5 seeds).
        >>> print(Speedup(1.08, 0.93, 1.26, 3, "no difference shown", 9).sentence("LS", "none"))
        LS against none, no difference shown: 1.08× in steps (95 % interval 0.93 to 1.26, 3 seeds); about 9 more seeds
        would settle a difference of this size.
        """
        if self.verdict == "cannot be judged":
            return f"{label} cannot be judged against {baseline}: {why_not(self, label, baseline)}."
        sentences = [finding(self, label, baseline)]
        early = [(self.early, label), (self.baseline_early, baseline)]
        there = " and ".join(f"{name} with {count} of {self.pairs} seeds" for count, name in early if count)
        if there:
            sentences.append(f"At the first evaluation there already: {there}.")
            sentences.append("Evaluate earlier (training.validate_every) to see all of it.")
        if lost := diverged_runs(self, label, baseline):
            sentences.append(f"{lost} diverged, which counts as never getting there.")
        return " ".join(sentences)


def judge(logs: Sequence[float], *, confidence: float = CONFIDENCE, **about: Any) -> Speedup:
    """The verdict on pairs whose speed-ups have these logarithms: only an interval without 1 says faster or slower.

    `about` are the clock and the counts of a Speedup.

    >>> judge([0.3, 0.5, 0.4]).verdict
    'faster'
    """
    about, pairs = {"confidence": confidence, **about}, len(logs)
    if not pairs or 2 * max(about.get("diverged", 0), about.get("baseline_diverged", 0)) > pairs:
        return Speedup(None, None, None, pairs, "cannot be judged", **about)
    value = math.exp(statistics.fmean(logs))
    if pairs == 1:
        return Speedup(value, None, None, pairs, "cannot be judged", **about)
    low, high = (math.exp(end) for end in bootstrap_interval(torch.tensor(logs, dtype=torch.float64), confidence))
    verdict = "faster" if low > 1 else "slower" if high < 1 else "no difference shown"
    more = seeds_to_settle(logs, confidence) if verdict == "no difference shown" else None
    return Speedup(value, low, high, pairs, verdict, more, **about)


def seeds_to_settle(logs: Sequence[float], confidence: float = CONFIDENCE) -> int | None:
    """How many more pairs it takes until the interval leaves out 1 with a chance of 80 %, if mean and spread stay.

    >>> seeds_to_settle([-0.1, 0.1, 0.3])
    31
    """
    mean, spread = abs(statistics.fmean(logs)), statistics.stdev(logs)
    for more in range(1, MOST_SEEDS + 1):
        count = len(logs) + more
        errors = student_quantile(confidence, count - 1) + student_quantile(2 * POWER - 1, count - 1)
        if mean > 0 and mean >= errors * spread / math.sqrt(count):
            return more
    return None


def finding(found: Speedup, label: str, baseline: str) -> str:
    """The sentence about a speed-up that could be judged."""
    value, low, high = (math.nan if x is None else x for x in (found.value, found.low, found.high))
    if found.verdict == "slower":
        times, interval = times_of(1 / value, OTHER_WAY[found.bound]), interval_of(found, 1 / high, 1 / low)
        return f"{label} takes {times} as many {found.clock} as {baseline} to the same loss {interval}."
    times, interval = times_of(value, found.bound), interval_of(found, low, high)
    if found.verdict == "faster":
        return f"{label} reaches the final validation loss of {baseline} in {times} fewer {found.clock} {interval}."
    numbers = f"{times} in {found.clock} {interval}"
    return f"{label} against {baseline}, no difference shown: {numbers}; {advice(found.more_seeds)}."


OTHER_WAY: dict[Bound | None, Bound | None] = {"at least": "at most", "at most": "at least", None: None}


def times_of(value: float, bound: Bound | None) -> str:
    """
    >>> times_of(16.0, "at least"), times_of(1.5, None)
    ('at least 16.00×', '1.50×')
    """
    return f"{bound} {figure(value)}×" if bound else f"{figure(value)}×"


def interval_of(found: Speedup, low: float, high: float) -> str:
    if not found.varies:
        return f"({found.pairs} seeds)"
    return f"({100 * found.confidence:g} % interval {figure(low)} to {figure(high)}, {found.pairs} seeds)"


def figure(x: float) -> str:
    """Two decimals, or more where 1.00 would hide on which side of 1 it is.

    >>> figure(1.524), figure(1.0021)
    ('1.52', '1.002')
    """
    return f"{x:.2f}" if abs(x - 1) >= 0.005 else f"{x:.4g}"


def advice(more_seeds: int | None) -> str:
    if more_seeds is None:
        return f"to settle so small a difference would take more than {MOST_SEEDS} more seeds"
    return f"about {more_seeds} more seed{'s'[: more_seeds > 1]} would settle a difference of this size"


def why_not(found: Speedup, label: str, baseline: str) -> str:
    if found.pairs < 2:
        return f"that takes at least 2 seeds, and there {'is 1' if found.pairs else 'are none'}"
    lost = diverged_runs(found, label, baseline)
    return f"{lost} diverged" if lost else "it takes more than one evaluation of the validation loss"


def diverged_runs(found: Speedup, label: str, baseline: str) -> str:
    lost = [(found.diverged, label), (found.baseline_diverged, baseline)]
    return " and ".join(f"{count} of {found.pairs} runs of {name}" for count, name in lost if count)
