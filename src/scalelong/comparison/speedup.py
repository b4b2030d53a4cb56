"""How many times fewer steps, or seconds, a method needs for the quality that the baseline ends with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .curves import Curve, log_steps_above, smooth
from .intervals import mean_interval, student_quantile

Clock = Literal["steps", "seconds"]
Verdict = Literal["faster", "slower", "no difference shown", "cannot be judged"]

POWER = 0.8
"""The chance with which the seeds that are advised would settle a difference of the size seen."""
MOST_SEEDS = 200
"""More than these are not advised: the difference is too small to matter."""


@dataclass(frozen=True)
class Speedup:
    """The geometric mean over pairs of (steps of the baseline) / (steps of the method), and what it allows to say."""

    value: float | None
    low: float | None
    high: float | None
    pairs: int
    verdict: Verdict
    more_seeds: int | None
    """How many more pairs would probably settle it; None where it is settled, or that would take too many."""
    diverged: int = 0
    """Runs of the method that diverged; they count as never getting below their first loss."""
    baseline_diverged: int = 0
    clock: Clock = "steps"
    confidence: float = 0.95

    def sentence(self, label: str, baseline_label: str = "the baseline") -> str:
        """What was found, in one sentence for people."""
        from .sentences import describe

        return describe(self, label, baseline_label)


def speedup(
    baseline: Sequence[Curve], method: Sequence[Curve], *, clock: Clock = "steps", confidence: float = 0.95
) -> Speedup:
    """Compare runs, finished or diverged, that are paired by position; with sides swapped it is 1 / the speed-up.

    >>> slow = [Curve((100, 200, 400, 800), (8.0 + seed, 4.0 + seed, 2.0 + seed, 1.0 + seed)) for seed in range(3)]
    >>> fast = [Curve((100, 200, 400, 800), (4.0 + seed, 2.0 + seed, 1.0 + seed, 0.5 + seed)) for seed in range(3)]
    >>> found = speedup(slow, fast)
    >>> round(found.value, 6), found.verdict
    (2.0, 'faster')
    """
    if len(baseline) != len(method):
        raise ValueError(f"runs are compared in pairs of the same seed: there are {len(baseline)} and {len(method)}")
    pairs = list(zip(baseline, method, strict=True))
    logs = [pair_log_speedup(*pair) for pair in pairs]
    if clock == "seconds":
        logs = [
            log + math.log(b.seconds_per_step / m.seconds_per_step) for log, (b, m) in zip(logs, pairs, strict=True)
        ]
    lost = sum(diverged(b, m) for b, m in pairs), sum(diverged(m, b) for b, m in pairs)
    return judge(logs, lost, clock, confidence)


def judge(logs: Sequence[float], lost: tuple[int, int], clock: Clock, confidence: float) -> Speedup:
    """Put the logarithms of the pairs' speed-ups, and the runs lost (baseline's, method's), into a verdict."""
    count = len(logs)
    if 2 * max(lost) > count or not count:
        return Speedup(None, None, None, count, "cannot be judged", None, lost[1], lost[0], clock, confidence)
    found = mean_interval(logs, confidence)
    value, low, high = (None if x is None else math.exp(x) for x in (found.value, found.low, found.high))
    verdict = verdict_of(low, high)
    more = seeds_to_settle(logs, confidence) if verdict == "no difference shown" else None
    return Speedup(value, low, high, count, verdict, more, lost[1], lost[0], clock, confidence)


def verdict_of(low: float | None, high: float | None) -> Verdict:
    if low is None or high is None:
        return "cannot be judged"
    return "faster" if low > 1 else "slower" if high < 1 else "no difference shown"


def seeds_to_settle(logs: Sequence[float], confidence: float) -> int | None:
    """How many more pairs it takes until an interval of this spread excludes 1 with a chance of about 80 %."""
    mean, spread = statistics.fmean(logs), statistics.stdev(logs)
    if mean == 0:
        return None
    for count in range(len(logs) + 1, len(logs) + MOST_SEEDS + 1):
        needed = student_quantile(confidence, count - 1) + student_quantile(2 * POWER - 1, count - 1)
        if abs(mean) * math.sqrt(count) >= needed * spread:
            return count - len(logs)
    return None


def diverged(run: Curve, partner: Curve) -> bool:
    """Whether a run's last loss is not finite, or it ended before its partner did."""
    last = max([0, *run.steps, *partner.steps])
    return run.last_step < last or run.last_step == 0


def pair_log_speedup(baseline: Curve, method: Curve) -> float:
    """Logarithm of (steps of the baseline) / (steps of the method) for one pair."""
    lost = diverged(baseline, method), diverged(method, baseline)
    if any(lost):
        steps = [step for step in (*baseline.steps, *method.steps) if step > 0] or [1]
        return (lost[0] - lost[1]) * math.log(max(steps) / min(steps))
    return float(log_speedup(*(part for run in (baseline, method) for part in tensors(run))))


def tensors(run: Curve) -> tuple[Tensor, Tensor]:
    """Steps and losses; without the loss at step 0, which has no logarithm."""
    steps, losses = (torch.tensor(values, dtype=torch.float64) for values in (run.steps, run.losses))
    return steps[steps > 0], losses[steps > 0]


def log_speedup(baseline_steps: Tensor, baseline: Tensor, method_steps: Tensor, method: Tensor) -> Tensor:
    """Logarithm of the speed-up of each pair. Shapes: (K,), (..., K), (J,), (..., J) → (...).

    The level is the final loss of whichever run ends worse, which that run reaches at its last step by definition; the
    other reached it earlier. A method that never comes down to the baseline's final loss is thus measured by when the
    baseline passed the method's.
    """
    baseline, method = smooth(baseline_steps, baseline), smooth(method_steps, method)
    end, method_end = baseline[..., -1], method[..., -1]
    last = math.log(baseline_steps[-1])
    gained = last - log_steps_above(method_steps, method, end)
    lost = last - log_steps_above(baseline_steps, baseline, method_end)
    return torch.where(method_end < end, gained, torch.where(method_end > end, -lost, 0.0))
