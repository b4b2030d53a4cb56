"""How many times fewer steps, or seconds, a method needs for the quality that the baseline ends with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .curves import Curve, log_steps_to, smooth
from .intervals import CONFIDENCE
from .verdicts import Clock, Speedup, judge

ROUNDING = 1e-12


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
    pairs, runs = list(zip(baseline, method, strict=True)), [*baseline, *method]
    last = max((step for run in runs for step in run.steps), default=0)
    first = min((step for run in runs for step in run.evaluated), default=last)
    diverged, baseline_diverged = (sum(not run.ends_at(last) for run in side) for side in (method, baseline))
    about: dict[str, Any] = {"clock": clock, "diverged": diverged, "baseline_diverged": baseline_diverged}
    if first == last:  # one evaluation puts all runs at the same step, which is no finding
        return Speedup(None, None, None, len(pairs), "cannot be judged", confidence=confidence, **about)
    logs = [log_speedup_of(*pair, first=first, last=last) for pair in pairs]
    early = [log for log, pair in zip(logs, pairs, strict=True) if is_early(log, *pair, last=last)]
    if clock == "seconds":
        logs = [log + log_cost(*pair, last) for log, pair in zip(logs, pairs, strict=True)]
    counts = {"early": sum(log > 0 for log in early), "baseline_early": sum(log < 0 for log in early)}
    return judge(logs, confidence=confidence, **about, **counts)


def log_cost(baseline: Curve, method: Curve, last: int) -> float:
    """Logarithm of how much longer a step of the baseline takes; nobody waits for a run that diverged."""
    ended = baseline.ends_at(last) and method.ends_at(last)
    return math.log(baseline.seconds_per_step / method.seconds_per_step) if ended else 0.0


def log_speedup_of(baseline: Curve, method: Curve, *, first: int, last: int) -> float:
    """Logarithm of the speed-up of one pair, of runs that are evaluated from the first step to the last.

    Against a run that diverged it is the largest that curves can show, last / first; two that diverged are equal.
    """
    lost, lost_base = not method.ends_at(last), not baseline.ends_at(last)
    if lost or lost_base:
        return (lost_base - lost) * math.log(last / first)
    return log_speedup(*tensors(baseline), *tensors(method)).item()


def is_early(log: float, baseline: Curve, method: Curve, *, last: int) -> bool:
    """Whether the better of two runs that ended was there by its first evaluation: the true speed-up may be larger."""
    if not log or not (baseline.ends_at(last) and method.ends_at(last)):
        return False
    first = tensors(method if log > 0 else baseline)[0][0].item()
    return abs(log) >= math.log(last / first) * (1 - ROUNDING)


def tensors(run: Curve) -> tuple[Tensor, Tensor]:
    """Steps and losses, without that at step 0, which has no logarithm."""
    steps, losses = (torch.tensor(values, dtype=torch.float64) for values in (run.steps, run.losses))
    return steps[steps > 0], losses[steps > 0]


def log_speedup(baseline_steps: Tensor, baseline: Tensor, method_steps: Tensor, method: Tensor) -> Tensor:
    """Logarithm of (steps of the baseline) / (steps of the method). Shapes: (K,), (..., K), (J,), (..., J) → (...).

    The level to reach is the final loss of the run that ends worse. That run is there at its last step, by definition;
    what is measured is when the other was. A method that never comes down to the baseline's final loss is thus judged
    by when the baseline had passed the method's, and nothing is cut off on either side.
    """
    baseline, method = smooth(baseline_steps, baseline), smooth(method_steps, method)
    base_end, end = baseline[..., -1], method[..., -1]
    gained = baseline_steps[-1].log() - log_steps_to(base_end, method_steps, method)
    lost = method_steps[-1].log() - log_steps_to(end, baseline_steps, baseline)
    return torch.where(end < base_end, gained, torch.where(end > base_end, -lost, 0.0))
