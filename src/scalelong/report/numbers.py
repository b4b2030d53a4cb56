"""Numbers with their intervals: how they are read, how they look on the page, and how long series become short ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, AliasChoices, Field

Points = list[tuple[float, float | None]]
"""x and y of a series; None where the value is missing or not finite."""

Band = list[tuple[float, float, float]]
"""x, lower and upper end."""


def finite(value: float | None) -> float | None:
    """The value; None where it is infinite or not a number."""
    return value if value is not None and math.isfinite(value) else None


Finite = Annotated[float | None, AfterValidator(finite)]
"""JSON has no infinity and no NaN: the trainer writes them as text, and charts leave a gap."""


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; None where it could not be had."""

    value: Annotated[float | None, Field(validation_alias=AliasChoices("value", "difference"))] = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Of a paired test, for a difference."""
    bound: str | None = None
    """at least or at most, for a speed-up where the curves begin too late to show all of it."""

    @property
    def known(self) -> bool:
        return finite(self.value) is not None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends of the interval; None where one is not known."""
        if self.low is None or self.high is None or math.isnan(self.low) or math.isnan(self.high):
            return None
        return self.low, self.high


NOTHING = "–"

TO = "\N{NO-BREAK SPACE}–\N{NO-BREAK SPACE}"
"""Between the ends of an interval, which should stay on one line."""


def show(value: float | str | None, digits: int = 4) -> str:
    """A number for people.

    >>> show(0.123456), show(3200), show(1234567.0), show(float("inf")), show(float("nan")), show(None), show(2e19)
    ('0.1235', '3,200', '1,234,567', '∞', 'not finite', '–', '2e+19')
    """
    if value is None or isinstance(value, bool | str):
        return NOTHING if value is None or value == "" else str(value)
    if math.isnan(value):
        return "not finite"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e12:
        return minus(f"{int(value):,}")
    return minus(f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.{digits}g}")


def minus(text: str) -> str:
    """With the sign that is as wide as a digit; not in exponents."""
    return f"−{text[1:]}" if text.startswith("-") else text


def show_estimate(estimate: Estimate | None, digits: int = 4) -> str:
    """
    >>> show_estimate(Estimate(1.42, 1.2, 1.7), 3)
    '1.42 (1.20\\xa0–\\xa01.70)'
    """
    if estimate is None or estimate.value is None:
        return NOTHING
    value, low, high = alike([estimate.value, estimate.low, estimate.high], digits)
    return value if estimate.low is None and estimate.high is None else f"{value} ({low}{TO}{high})"


def show_factor(estimate: Estimate) -> str:
    """How many times, with two decimals as in the sentences of a comparison.

    >>> show_factor(Estimate(0.986, 0.9321, 1.0512))
    '0.99× (0.93\\xa0–\\xa01.05)'
    """
    if estimate.value is None:
        return "not measured"
    numbers = (estimate.value, estimate.low, estimate.high)
    value, low, high = (show(x) if finite(x) is None else f"{x:.2f}" for x in numbers)
    times = f"{estimate.bound or ''} {value}×".strip()
    return times if estimate.low is None and estimate.high is None else f"{times} ({low}{TO}{high})"


def alike(numbers: Sequence[float | None], digits: int) -> list[str]:
    """With as many decimals as the digits of the first take, or fewer where that is tiny beside the others.

    >>> alike([1.16, 0.004, 295.22, None], 3), alike([0.00001, -0.0031, 0.0029], 3)
    (['1.16', '0.00', '295.22', '–'], ['0.000010', '−0.003100', '0.002900'])
    """
    sizes = [abs(x) for x in numbers if x is not None and math.isfinite(x)]
    size = max(sizes[0], max(sizes) / 30) if sizes else 0.0
    if not 1e-5 <= size < 1e4:
        return [show(x, digits) for x in numbers]
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return [show(x, digits) if finite(x) is None else minus(f"{x:.{decimals}f}") for x in numbers]


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "seed"), plural(1200, "step")
    ('1 seed', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def duration(seconds: float | None) -> str:
    """
    >>> duration(42.4), duration(754), duration(7260)
    ('42 s', '12 min 34 s', '2 h 1 min')
    """
    if finite(seconds) is None or seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def thin(points: Points, most: int) -> Points:
    """At most about `most` points that keep every spike: of each stretch of the series its lowest and its highest.

    >>> thin([(0, 1.0), (1, 9.0), (2, 2.0), (3, 2.5), (4, 0.5), (5, 1.0)], 4)
    [(0, 1.0), (1, 9.0), (3, 2.5), (4, 0.5)]
    """
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: Points = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        known = [(y, place) for place, (_, y) in enumerate(stretch) if y is not None]
        ends = sorted({min(known)[1], max(known)[1]}) if known else [0]
        kept += [stretch[place] for place in ends]
    return kept
