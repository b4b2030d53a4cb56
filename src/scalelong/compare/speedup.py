"""How many times fewer steps, or seconds, a method needs for the quality that the baseline ends with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .intervals import CONFIDENCE, Curve, bootstrap_interval, student_quantile

Clock = Literal["steps", "seconds"]
Verdict = Literal["faster", "slower", "no difference shown", "cannot be judged"]
Bound = Literal["at least", "at most"]
OTHER_WAY: dict[Bound | None, Bound | None] = {"at least": "at most", "at most": "at least", None: None}

BANDWIDTH = 0.25  # Of the smoothing, in the natural logarithm of the step: at step 1000 it reaches from 779 to 1284.
ROUNDING = 1e-12
POWER = 0.8  # The chance with which the seeds that are advised settle a difference, if it is as large as it seems.
MOST_SEEDS = 200  # More of them are not advised.


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
        pairs, counts = self.pairs, [(self.diverged, label), (self.baseline_diverged, baseline)]
        lost = " and ".join(f"{count} of {pairs} runs of {name}" for count, name in counts if count)
        if self.verdict == "cannot be judged":
            why = f"{lost} diverged" if lost else "it takes more than one evaluation of the validation loss"
            if pairs < 2:
                why = f"that takes at least 2 seeds, and there {'is 1' if pairs else 'are none'}"
            return f"{label} cannot be judged against {baseline}: {why}."
        sentences, early = [finding(self, label, baseline)], [(self.early, label), (self.baseline_early, baseline)]
        if there := " and ".join(f"{name} with {count} of {pairs} seeds" for count, name in early if count):
            sentences.append(f"At the first evaluation there already: {there}.")
            sentences.append("Evaluate earlier (training.validate_every) to see all of it.")
        if lost:
            sentences.append(f"{lost} diverged, which counts as never getting there.")
        return " ".join(sentences)


def speedup(
    baseline: Sequence[Curve], method: Sequence[Curve], *, clock: Clock = "steps", confidence: float = CONFIDENCE
) -> Speedup:
    """Compare runs that are paired by position; with the sides swapped it is one over the speed-up.

    Pass runs that have ended, all of them: one whose curve is shorter than that of others counts as diverged.

    >>> def run(seed: int, faster: float) -> Curve:
    ...     steps = range(100, 3300, 100)
    ...     return Curve(tuple(steps), tuple(1 / math.sqrt(1 + step * faster / (50 + seed)) for step in steps))
    >>> found = speedup([run(seed, 1.0) for seed in range(3)], [run(seed, 2.0 + 0.1 * seed) for seed in range(3)])
    >>> round(found.value, 2), found.verdict
    (2.1, 'faster')
    """
    if len(baseline) != len(method):
        raise ValueError(f"runs are compared in pairs of the same seed: there are {len(baseline)} and {len(method)}")
    runs = [*baseline, *method]
    last = max((step for run in runs for step in run.steps), default=0)
    first = min((step for run in runs for step in run.evaluated), default=last)
    diverged, baseline_diverged = (sum(not run.ends_at(last) for run in side) for side in (method, baseline))
    about: dict[str, Any] = {"clock": clock, "diverged": diverged, "baseline_diverged": baseline_diverged}
    if first == last:  # One evaluation puts all runs at the same step, which is no finding.
        return Speedup(None, None, None, len(method), "cannot be judged", confidence=confidence, **about)
    pairs = [compare_pair(*pair, first, last, clock) for pair in zip(baseline, method, strict=True)]
    early = [sign for _, sign in pairs]
    counts = {"early": early.count(1), "baseline_early": early.count(-1)}
    return judge([log for log, _ in pairs], confidence=confidence, **about, **counts)


def compare_pair(baseline: Curve, method: Curve, first: int, last: int, clock: Clock) -> tuple[float, int]:
    """Logarithm of the speed-up of two runs; and 1 (−1) if the method (the baseline) was there by its first evaluation,
    so that the true speed-up may be larger.

    Against a run that diverged it is the largest that curves can show, last / first; two that diverged are equal.
    """
    lost, lost_base = not method.ends_at(last), not baseline.ends_at(last)
    if lost or lost_base:
        return (lost_base - lost) * math.log(last / first), 0
    log = log_speedup(*tensors(baseline), *tensors(method)).item()
    steps_of_better, _ = tensors(method if log > 0 else baseline)
    is_early = abs(log) >= math.log(last / steps_of_better[0].item()) * (1 - ROUNDING)
    cost = math.log(baseline.seconds_per_step / method.seconds_per_step) if clock == "seconds" else 0.0
    return log + cost, is_early * ((log > 0) - (log < 0))


def tensors(run: Curve) -> tuple[Tensor, Tensor]:
    """Steps and losses, without that at step 0, which has no logarithm."""
    steps, losses = (torch.tensor(values, dtype=torch.float64) for values in (run.steps, run.losses))
    return steps[steps > 0], losses[steps > 0]


def log_speedup(baseline_steps: Tensor, baseline: Tensor, method_steps: Tensor, method: Tensor) -> Tensor:
    """Logarithm of (steps of the baseline) / (steps of the method). Shapes: (K,), (..., K), (J,), (..., J) → (...).

    The level to reach is the final loss of the run that ends worse, at its last step; what is measured is when the
    other was there. So nothing is cut off where a method never comes down to the baseline's final loss.
    """
    baseline, method = smooth(baseline_steps, baseline), smooth(method_steps, method)
    base_end, end = baseline[..., -1], method[..., -1]
    gained = baseline_steps[-1].log() - log_steps_to(base_end, method_steps, method)
    lost = method_steps[-1].log() - log_steps_to(end, baseline_steps, baseline)
    return torch.where(end < base_end, gained, torch.where(end > base_end, -lost, 0.0))


def smooth(steps: Tensor, losses: Tensor) -> Tensor:
    """Losses smoothed along a curve; one that is not finite counts as the highest of its run. Shape: (K,), (..., K)."""
    finite = losses.isfinite()
    highest = losses.where(finite, -torch.inf).amax(-1, keepdim=True)
    return losses.where(finite, highest) @ smoothing(steps).T


def smoothing(steps: Tensor) -> Tensor:
    """The matrix that fits a line in the logarithm of the step around each evaluation. Shape: (K,) → (K, K).

    A line, not a mean: all neighbours of the last step are earlier, and the mean of a falling curve is above its end.
    What the lines leave over is smoothed as well and added: a curve that bends then keeps its bend.

    >>> steps = torch.tensor([700.0, 800.0, 900.0, 1000.0]).double()
    >>> torch.allclose(smoothing(steps) @ -steps.log(), -steps.log())
    True
    """
    x = steps.double().log()
    away = x - x[:, None]
    weight = (1 - (away / BANDWIDTH) ** 2).clamp(min=0)
    zeroth, first, second = ((weight * away**power).sum(1, keepdim=True) for power in range(3))
    spread = zeroth * second - first**2
    lonely = spread < 1e-12  # no neighbour within the bandwidth
    itself = torch.eye(len(x), dtype=torch.float64)
    line = torch.where(lonely, itself, weight * (second - first * away) / spread.where(~lonely, 1))
    return line + line @ (itself - line)


def log_steps_to(level: Tensor, steps: Tensor, losses: Tensor) -> Tensor:
    """Logarithm of the step at which a falling curve comes down to a level. Shape: (...), (K,), (..., K) → (...).

    That is the time spent above the level, with straight lines between the evaluations. For a curve that crosses once
    it is the crossing; for a noisy one neither the first crossing, which is early by luck, nor the last, which is late.

    >>> losses = torch.tensor([8.0, 4.0, 2.0, 1.0])
    >>> log_steps_to(torch.tensor(3.0), torch.tensor([1.0, 10.0, 100.0, 1000.0]), losses).exp()
    tensor(31.6228, dtype=torch.float64)
    """
    x = steps.double().log()
    above = losses - level[..., None]
    left, right = above[..., :-1], above[..., 1:]
    whole = left.abs() + right.abs()
    share = (left.clamp(min=0) + right.clamp(min=0)) / whole.where(whole > 0, 1)
    return x[0] + (share * x.diff()).sum(-1)


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
    for count in range(len(logs) + 1, len(logs) + MOST_SEEDS + 1):
        errors = student_quantile(confidence, count - 1) + student_quantile(2 * POWER - 1, count - 1)
        if mean > 0 and mean >= errors * spread / math.sqrt(count):
            return count - len(logs)
    return None


def finding(found: Speedup, label: str, baseline: str) -> str:
    """The sentence about a speed-up that could be judged."""
    ends, bound, clock = (found.value, found.low, found.high), found.bound, found.clock
    value, low, high = (math.nan if x is None else x for x in ends)
    if found.verdict == "slower":
        value, low, high, bound = 1 / value, 1 / high, 1 / low, OTHER_WAY[bound]
    times = f"{bound} {figure(value)}×" if bound else f"{figure(value)}×"
    interval = f"{100 * found.confidence:g} % interval {figure(low)} to {figure(high)}, " if found.varies else ""
    seen = f"({interval}{found.pairs} seeds)"
    if found.verdict == "slower":
        return f"{label} takes {times} as many {clock} as {baseline} to the same loss {seen}."
    if found.verdict == "faster":
        return f"{label} reaches the final validation loss of {baseline} in {times} fewer {clock} {seen}."
    more = found.more_seeds
    advice = f"to settle so small a difference would take more than {MOST_SEEDS} more seeds"
    if more is not None:
        advice = f"about {more} more seed{'s'[: more > 1]} would settle a difference of this size"
    return f"{label} against {baseline}, no difference shown: {times} in {clock} {seen}; {advice}."


def figure(x: float) -> str:
    """Two decimals, or more where 1.00 would hide on which side of 1 it is.

    >>> figure(1.524), figure(1.0021)
    ('1.52', '1.002')
    """
    return f"{x:.2f}" if abs(x - 1) >= 0.005 else f"{x:.4g}"
