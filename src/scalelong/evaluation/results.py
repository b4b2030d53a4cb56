"""What an evaluation found: figures with the fingerprint of all that they depend on, and which may be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..sampling.sample_run import sampling_details
from ..utils.atomic import replace_text, to_json
from ..utils.block_folder import Fingerprint
from ..utils.records import sealed, unsealed
from .features import FeatureNetwork
from .inception import SPATIAL
from .metrics import Figure
from .networks import INCEPTION, RESIZES
from .reference import Reference

FILE = "evaluation.json"

# What each part of a fingerprint is called in messages.
NAMES = {
    "network": "feature network",
    "weights": "weights of the feature network",
    "resize": "resize",
    "images": "number of images",
    "sampler": "sampler",
    "precision": "precision of the sampling",
    "captions": "number of captions",
    "reference": "reference images",
    "reference_images": "number of reference images",
}


class NotComparable(ValueError):
    """Two figures that mean different things; the message names what differs."""


@dataclass(frozen=True)
class Evaluation:
    """The figures of one checkpoint, by name, and everything that must be equal for them to be compared."""

    fingerprint: Fingerprint
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
        return cls(**{**content, "figures": figures})


def result_fingerprint(
    config: Config,
    network: FeatureNetwork,
    reference: Reference,
    images: int,
    *,
    compiled: bool = False,
    precision: str = "fp32",
) -> Fingerprint:
    """All that must be equal for two results to be compared; known before an image is sampled."""
    mean = reference.statistics.mean.numpy().tobytes()
    return {
        **network.fingerprint,
        "images": images,
        "sampler": describe_sampler(config, compiled=compiled),
        "precision": precision,
        # Images of the same caption are less varied than those of as many different ones.
        "captions": None if config.text is None else min(images, config.data.validation_count),
        # The hash of its images; of its mean, where the file does not say.
        "reference": str(reference.fingerprint.get("data", hashlib.sha256(mean).hexdigest()[:16])),
        "reference_images": reference.statistics.count,
    }


def describe_sampler(config: Config, compiled: bool = False) -> str:
    """
    >>> from scalelong.config import load_recipe
    >>> describe_sampler(load_recipe("digits"))
    'ddpm, 200 steps'
    """
    sampling = config.sampling
    guidance = f", guidance {sampling.guidance:g}" if config.conditional else ""
    details = "".join(f", {detail}" for detail in sampling_details(config))
    return f"{sampling.sampler}, {config.sampling_steps} steps{details}{guidance}{', compiled' if compiled else ''}"


def check_reference(reference: Reference, network: FeatureNetwork) -> None:
    """Raise unless a reference was made with the same network, weights and resize, as far as it says."""
    advice = "make statistics with the same network (scalelong stats --network)"
    found, wanted, width = reference.fingerprint, network.fingerprint, reference.statistics.width
    for key in [key for key in wanted if key in found and found[key] != wanted[key]]:
        said = f"the reference's {key} is {found[key]!r}, and the evaluation's is {wanted[key]!r}"
        fitting = [name for name, resize in RESIZES.items() if key == "resize" and str(resize) == found[key]]
        raise NotComparable(f"{said}: {f'use --resize {fitting[0]}' if fitting else advice}")
    if "weights" not in found and not network.distance.startswith("FID"):
        raise NotComparable(
            "the reference does not say what weights it was made with, so it is taken for pytorch-fid's, whose network "
            f"is {INCEPTION!r} with the released weights, and the evaluation's is {network.name!r} with the weights "
            f"{network.weights}: {advice}"
        )
    if network.width not in (None, width):
        raise NotComparable(f"the reference has {width} features, and {network.name} has {network.width}: {advice}")
    if reference.spatial is not None and reference.spatial.width != SPATIAL:
        raise NotComparable(f"the reference has {reference.spatial.width} spatial features, and the sFID has {SPATIAL}")


def compare(first: Evaluation, second: Evaluation) -> dict[str, float]:
    """How much each figure of the second is above that of the first; raises NotComparable where fingerprints differ.

    >>> fingerprint = {"network": "inception", "images": 50_000}
    >>> one, other = (Evaluation(fingerprint, {"FID": Figure(value)}, 0, "ema") for value in (4.0, 3.0))
    >>> compare(one, other)
    {'FID': -1.0}
    """
    check_comparable(first.fingerprint, second.fingerprint)
    shared = [name for name in first.figures if name in second.figures]
    return {name: second.figures[name].value - first.figures[name].value for name in shared}


def check_comparable(first: Fingerprint, second: Fingerprint) -> None:
    """Raise NotComparable, with what differs, unless figures with these fingerprints mean the same."""
    for key in [key for key in {**NAMES, **first, **second} if first.get(key) != second.get(key)]:
        raise NotComparable(
            f"these figures cannot be compared: the {NAMES.get(key, key)} is {first.get(key)!r} and {second.get(key)!r}"
        )


def counterpart(fingerprint: Fingerprint, weights: str, others: Sequence[Evaluation]) -> Evaluation:
    """The latest that may be compared with such a fingerprint, if possible of the same weights; else the latest."""
    fair = [other for other in others if other.fingerprint == fingerprint]
    alike = [other for other in fair if other.weights == weights]
    return (alike or fair or others)[-1]


def record(folder: Path, found: Sequence[Evaluation]) -> None:
    """Write evaluations to a run's file, replacing those of the same step, weights, seed and fingerprint."""

    def identity(one: Evaluation) -> tuple[Any, ...]:
        return one.step, one.weights, one.seed, one.fingerprint

    path, new = folder / FILE, [identity(one) for one in found]
    kept = [one for one in read_evaluations(path) if identity(one) not in new] if path.is_file() else []
    write_evaluations(path, [*kept, *found])


def forget_after(folder: Path, step: int) -> None:
    """Leave out the evaluations of later steps, which a run that resumes from this step has not done yet."""
    path = folder / FILE
    if path.is_file():
        write_evaluations(path, [one for one in read_evaluations(path) if one.step <= step])


def write_evaluations(path: Path, evaluations: Sequence[Evaluation]) -> None:
    replace_text(path, to_json([sealed(asdict(one)) for one in evaluations]).decode())


def read_evaluations(path: Path) -> list[Evaluation]:
    """Those in a file, or in the file of a run's folder, the latest last."""
    file = path / FILE if path.is_dir() else path
    try:
        return [Evaluation.from_json(unsealed(entry)) for entry in json.loads(file.read_bytes())]
    except FileNotFoundError:
        raise ValueError(f"there is no {file}: scalelong evaluate writes it") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} does not hold evaluations ({error}): remove it") from error
