"""How the files of a run are read by its own package, by comparisons and by reports, which do not import each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe by its dotted keys.

    >>> flatten({"a": {"b": 1}, "c": [2, 3]})
    {'a.b': 1, 'c': [2, 3]}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def is_reading(names: Iterable[str]) -> bool:
    """Whether a line of metrics.jsonl with these numbers is one of the monitor.

    >>> is_reading(["step", "block/mid_block/feature"]), is_reading(["step", "loss"])
    (True, False)
    """
    return any(name.startswith(("skip", "block/")) for name in names)


def trained_seconds(times: Iterable[tuple[float, float]], begins: Sequence[float]) -> float | None:
    """The time of all sessions of a run, from the steps and seconds that it logged; None if there are none.

    The clock begins anew with each session. `begins` are the steps that they began after, in their order. A line is of
    the last session that began before its step, because what was logged beyond that step was cut off then.

    >>> trained_seconds([(5, 60.0), (8, 90.0)], [0, 5])
    150.0
    """
    longest: dict[int, float] = {}
    for step, seconds in times:
        session = max((place for place, begin in enumerate(begins) if begin < step), default=0)
        longest[session] = max(seconds, longest.get(session, 0.0))
    return sum(longest.values()) if longest else None
