"""What an evaluation found: figures with the facts they depend on, kept in a file and compared where that is fair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..utils.atomic import Files, atomic_write, to_json
from .metrics import Figure
from .statistics import Facts

FILE = "evaluation.json"

# What each fact is called in messages.
NAMES = {
    "network": "feature network",
    "weights": "weights of the feature network",
    "resize": "resize",
    "images": "number of images",
    "sampler": "sampler",
    "precision": "precision of the drawing",
    "captions": "number of captions",
    "reference": "reference images",
    "reference_images": "number of reference images",
}


class NotComparable(ValueError):
    """Two figures that mean different things; the message names what differs."""


@dataclass(frozen=True)
class Evaluation:
    """The figures of one checkpoint, by name, and everything that must be equal for them to be compared."""

    facts: Facts
    figures: dict[str, Figure]
    step: int
    weights: str
    """Of the evaluated network: ema or raw."""
    seed: int = 0
    """The first image's. Figures of different seeds may be compared; they are kept beside each other."""

    def __str__(self) -> str:
        return f"{self.weights}: {', '.join(f'{name} {figure}' for name, figure in self.figures.items())}"

    def numbers(self) -> dict[str, float]:
        """The figures and their intervals by flat names, as metrics.jsonl has them.

        >>> Evaluation({}, {"FID": Figure(3.0, 0.1, 2.8, 3.2)}, step=10, weights="raw").numbers()
        {'FID_raw': 3.0, 'FID_raw_low': 2.8, 'FID_raw_high': 3.2}
        """
        suffix = "" if self.weights == "ema" else f"_{self.weights}"
        numbers = {}
        for name, figure in self.figures.items():
            ends = {"": figure.value, "_low": figure.low, "_high": figure.high}
            numbers |= {f"{name}{suffix}{end}": value for end, value in ends.items() if value is not None}
        return numbers

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Evaluation:
        figures = {name: Figure(**figure) for name, figure in content["figures"].items()}
        return cls(content["facts"], figures, content["step"], content["weights"], content.get("seed", 0))


def compare(first: Evaluation, second: Evaluation) -> dict[str, float]:
    """How much each figure of the second is above that of the first; raises NotComparable where facts differ.

    >>> facts = {"network": "inception", "images": 50_000}
    >>> one, other = (Evaluation(facts, {"FID": Figure(value)}, 0, "ema") for value in (4.0, 3.0))
    >>> compare(one, other)
    {'FID': -1.0}
    """
    check_comparable(first.facts, second.facts)
    shared = [name for name in first.figures if name in second.figures]
    return {name: second.figures[name].value - first.figures[name].value for name in shared}


def check_comparable(first: Facts, second: Facts) -> None:
    """Raise NotComparable, with what differs, unless figures with these facts mean the same."""
    for key in sorted(first.keys() | second.keys(), key=list({**NAMES, **first, **second}).index):
        one, other = first.get(key), second.get(key)
        if one != other:
            raise NotComparable(f"these figures cannot be compared: the {NAMES.get(key, key)} is {one!r} and {other!r}")


def counterpart(facts: Facts, weights: str, others: Sequence[Evaluation]) -> Evaluation:
    """The latest of some that may be compared with such facts, if possible of the same weights; else the latest."""
    fair = [other for other in others if other.facts == facts]
    alike = [other for other in fair if other.weights == weights]
    return (alike or fair or others)[-1]


def record(folder: Path, found: Sequence[Evaluation]) -> Path:
    """Write evaluations to a run's file, in the place of earlier ones of the same checkpoint, seed and facts."""
    path, new = folder / FILE, [identity(one) for one in found]
    kept = [one for one in read_evaluations(path) if identity(one) not in new] if path.is_file() else []
    return write_evaluations(path, [*kept, *found])


def forget_after(folder: Path, step: int) -> None:
    """Leave out the evaluations of later steps, which a run that goes on from this step has not done yet."""
    path = folder / FILE
    before = read_evaluations(path) if path.is_file() else []
    kept = [one for one in before if one.step <= step]
    if len(kept) < len(before):
        write_evaluations(path, kept)


def write_evaluations(path: Path, evaluations: Sequence[Evaluation]) -> Path:
    content = to_json([asdict(one) for one in evaluations])
    atomic_write(path, lambda temporary: Files().write_bytes(temporary, content))
    return path


def read_evaluations(path: Path) -> list[Evaluation]:
    """Those in a file, or in the file of a run's folder, the latest last."""
    file = path / FILE if path.is_dir() else path
    try:
        return [Evaluation.from_json(content) for content in json.loads(file.read_bytes())]
    except FileNotFoundError:
        raise ValueError(f"there is no {file}: scalelong evaluate writes it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not hold evaluations ({error}): remove it") from error


def identity(one: Evaluation) -> tuple[Any, ...]:
    return one.step, one.weights, one.seed, sorted(one.facts.items(), key=str)


__all__ = [
    "FILE",
    "Evaluation",
    "NotComparable",
    "check_comparable",
    "compare",
    "counterpart",
    "read_evaluations",
    "record",
]
