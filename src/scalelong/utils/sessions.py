"""How long a run has trained: its clock begins anew whenever it resumes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def trained_seconds(times: Iterable[tuple[float, float]], begins: Sequence[float]) -> float | None:
    """The time of all sessions of a run, from the steps and seconds that it logged; None if there are none.

    `begins` are the steps that its sessions began after, in their order. A line is of the last session that began
    before its step, because what was logged beyond that step was cut off then.

    >>> trained_seconds([(5, 60.0), (8, 90.0)], [0, 5])
    150.0
    """
    longest: dict[int, float] = {}
    for step, seconds in times:
        session = max((place for place, begin in enumerate(begins) if begin < step), default=0)
        longest[session] = max(seconds, longest.get(session, 0.0))
    return sum(longest.values()) if longest else None
