"""The verdict on a speed-up as a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .speedup import Speedup


def describe(found: Speedup, label: str, baseline: str) -> str:
    """What was found, what it rests on, and which runs diverged."""
    return tell(found, label, baseline) + lost_runs(found, label, baseline)


def tell(found: Speedup, label: str, baseline: str) -> str:
    if found.verdict == "cannot be judged":
        return f"{label} cannot be judged against {baseline}: {reason(found)}."
    if found.verdict == "no difference shown":
        return f"{label}, no difference shown from {baseline}: {figures(found)}; {advice(found)}."
    if found.verdict == "faster":
        return f"{label} reaches the final held-out loss of {baseline} in {figures(found)}."
    return f"{label} is slower than {baseline}: {figures(found)}."


def figures(found: Speedup) -> str:
    """Such as: 1.52× fewer steps (95 % interval 1.31 to 1.77, 5 seeds)."""
    assert found.value is not None
    interval = (
        f"{100 * found.confidence:g} % interval {found.low:.2f} to {found.high:.2f}, {count(found.pairs, 'seed')}"
    )
    return f"{found.value:.2f}× fewer {found.clock} ({interval})"


def advice(found: Speedup) -> str:
    if found.more_seeds is None:
        return "so small a difference would take more than 200 more seeds to settle"
    return f"about {found.more_seeds} more would settle a difference of this size"


def reason(found: Speedup) -> str:
    if found.pairs < 2:
        return f"it takes at least 2 seeds, and there {'is' if found.pairs == 1 else 'are'} {found.pairs}"
    return "too many runs diverged"


def lost_runs(found: Speedup, label: str, baseline: str) -> str:
    lost = [(found.diverged, label), (found.baseline_diverged, baseline)]
    parts = [f"{number} of {count(found.pairs, 'run')} of {name}" for number, name in lost if number]
    return f" Diverged, and counted as never reaching it: {', '.join(parts)}." if parts else ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
