"""The records of a monitor, and the flat vector of numbers that they are kept in until someone asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Numbers = Mapping[str, float]

OF_SKIP = ("feature", "gradient", "share", "coefficient")
"""The series of a skip, each with an oscillation index of its own."""
SPREAD = ("coefficient_std", "coefficient_low", "coefficient_median", "coefficient_high")
OF_BLOCK = ("feature", "gradient", "update")
"""The series of a block."""
NOISE = "feature_noise"
"""How far `feature` moves from one draw of the batch to another with the same weights, over its size."""
OF_MODEL = ("robustness", "robustness_max")


@dataclass(frozen=True)
class Spread:
    """The coefficients of one skip over the batch: mean, standard deviation, and the 5, 50 and 95 % quantiles."""

    mean: float
    std: float
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class SkipReading:
    """One long skip as it enters the decoder: after its coefficient, if the model is scaled at the input.

    `feature` is the norm of an image's skip (root mean square over the batch), `feature_noise` the relative standard
    error that the draw of the batch gives it, `gradient` the norm of the loss's gradient with respect to it, `share`
    its part of the squared norm of the joined features. NaN: could not be read.
    """

    index: int
    consumer: str
    feature: float
    feature_noise: float
    gradient: float
    share: float
    coefficient: Spread | None
    """None if the skip is not scaled."""
    oscillation: dict[str, float]
    """The index of each series over the window; NaN until there are enough readings."""


@dataclass(frozen=True)
class BlockReading:
    """One block: the norm of its output for an image (root mean square over the batch) and its relative standard error,
    the norm of the gradient that the optimiser took for its weights, and how far they moved, over their own norm. NaN:
    could not be read.
    """

    name: str
    feature: float
    feature_noise: float
    gradient: float
    update: float
    oscillation: dict[str, float]


@dataclass(frozen=True)
class Robustness:
    """‖f(x+δ) − f(x)‖ / ‖δ‖ for a random δ, over the images of a batch: the mean and the largest (Theorem 3.4)."""

    mean: float
    max: float


@dataclass(frozen=True)
class Reading:
    """What was seen at one step; `robustness` is None unless it was measured then."""

    step: int
    skips: tuple[SkipReading, ...]
    blocks: tuple[BlockReading, ...]
    robustness: Robustness | None

    def as_dict(self) -> dict[str, Any]:
        """Nested, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Layout:
    """The names of all numbers of a reading, in order. `skips` are indices and consumers, outermost first."""

    skips: tuple[tuple[int, str], ...]
    blocks: tuple[str, ...]
    """In the order of the forward pass."""

    @property
    def series(self) -> list[str]:
        """The names of the numbers that have an oscillation index."""
        of_skips = [f"skip{index}/{name}" for index, _ in self.skips for name in OF_SKIP]
        return of_skips + [f"block/{block}/{name}" for block in self.blocks for name in OF_BLOCK]

    @property
    def names(self) -> list[str]:
        spread = [f"skip{index}/{name}" for index, _ in self.skips for name in SPREAD]
        return [*self.series, *self.noise.values(), *spread, *OF_MODEL]

    @property
    def noise(self) -> dict[str, str]:
        """The series of features, and the name of the noise of each."""
        owners = [*(f"skip{index}" for index, _ in self.skips), *(f"block/{block}" for block in self.blocks)]
        return {f"{owner}/feature": f"{owner}/{NOISE}" for owner in owners}

    def reading(self, step: int, numbers: Numbers, oscillation: Numbers) -> Reading:
        """The typed record of a reading's numbers and of the oscillation of its series, by name."""
        skips = tuple(self._skip(index, consumer, numbers, oscillation) for index, consumer in self.skips)
        blocks = tuple(self._block(name, numbers, oscillation) for name in self.blocks)
        mean, largest = (numbers[name] for name in OF_MODEL)
        return Reading(step, skips, blocks, None if math.isnan(mean) else Robustness(mean, largest))

    def _skip(self, index: int, consumer: str, numbers: Numbers, oscillation: Numbers) -> SkipReading:
        read = {name: numbers[f"skip{index}/{name}"] for name in (*OF_SKIP, NOISE, *SPREAD)}
        spread = Spread(*(read.pop(name) for name in ("coefficient", *SPREAD)))
        moved = {name: oscillation[f"skip{index}/{name}"] for name in OF_SKIP}
        return SkipReading(
            index=index,
            consumer=consumer,
            **read,
            coefficient=None if math.isnan(spread.mean) else spread,
            oscillation=moved,
        )

    def _block(self, block: str, numbers: Numbers, oscillation: Numbers) -> BlockReading:
        read = {name: numbers[f"block/{block}/{name}"] for name in (*OF_BLOCK, NOISE)}
        moved = {name: oscillation[f"block/{block}/{name}"] for name in OF_BLOCK}
        return BlockReading(name=block, **read, oscillation=moved)


def flat(numbers: Numbers, oscillation: Numbers) -> dict[str, float]:
    """All numbers that could be read, and the oscillation of their series, for any logger.

    >>> flat({"skip1/feature": 2.0, "skip1/share": float("nan")}, {"skip1/feature": 0.1, "skip1/share": 0.2})
    {'skip1/feature': 2.0, 'skip1/feature_oscillation': 0.1, 'skip1/share_oscillation': 0.2}
    """
    everything = {**numbers, **{f"{name}_oscillation": value for name, value in oscillation.items()}}
    return {name: value for name, value in everything.items() if not math.isnan(value)}


def with_nulls(value: Any) -> Any:
    """The value with null in place of what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: with_nulls(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [with_nulls(item) for item in value]
    return value
