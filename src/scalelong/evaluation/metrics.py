"""Statistics of features, and the Fréchet and kernel distances between two sets, each with a 95 % interval.

An interval says how far a figure would move with as many other samples. Fréchet distance and recall: against
the same reference. Precision: the same, exactly binomial. KID, which is unbiased: with another reference as well.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CONFIDENCE = 0.95
# Parts that are left out in turn; with so many the interval is hardly wider than with all images one by one.
GROUPS = 20
# The subsets of the KID's authors have 1000 images; smaller ones estimate the same, and ten at least give an error.
SUBSET, SUBSETS = 1000, 10
# Of the Inception Score; papers report the mean and the deviation of so many.
SPLITS = 10


@dataclass(frozen=True)
class Statistics:
    """Shape: mean (D,), covariance (D, D), both float64; the covariance is divided by count − 1, as numpy's is."""

    mean: Tensor
    covariance: Tensor
    count: int | None
    """None where a file does not say."""

    @property
    def width(self) -> int:
        return len(self.mean)


class Moments:
    """Running count, mean and sum of squared deviations (Chan et al.): parts may come in any sizes.

    >>> x = torch.arange(12.0).view(6, 2)
    >>> moments = Moments().add(x[:1]).add(x[1:])
    >>> moments.statistics().covariance.tolist()
    [[14.0, 14.0], [14.0, 14.0]]
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, 0, dtype=torch.float64)

    def add(self, features: Tensor) -> Moments:
        """Shape: (B, D), of any float type."""
        x = features.double()
        check_finite(x)
        if not len(x):
            return self  # None of a block's images could be read.
        count, mean = len(x), x.mean(0)
        centred = x - mean
        scatter = centred.T @ centred
        if not self.count:
            self.count, self.mean, self.scatter = count, mean, scatter
            return self
        total, step = self.count + count, mean - self.mean
        self.scatter += scatter
        self.scatter.addr_(step, step, alpha=self.count * count / total)
        self.mean = self.mean + step * (count / total)
        self.count = total
        return self

    def without(self, part: Moments) -> Moments:
        """The moments of what was added except one part, which is known."""
        rest = Moments()
        rest.count = self.count - part.count
        rest.mean = (self.mean * self.count - part.mean * part.count) / rest.count
        step = part.mean - rest.mean
        rest.scatter = (self.scatter - part.scatter).addr_(step, step, alpha=-rest.count * part.count / self.count)
        return rest

    def statistics(self) -> Statistics:
        if self.count < 2:
            raise ValueError(f"a covariance needs at least two images, not {self.count}")
        return Statistics(self.mean, self.scatter / (self.count - 1), self.count)


def check_finite(features: Tensor) -> None:
    if not torch.isfinite(features).all():
        raise ValueError("features are not finite: the images, or the feature network, are broken")


def statistics_of(features: Tensor, block: int = 4096) -> Statistics:
    """The statistics of features in memory, or mapped from a file. Shape: (N, D)."""
    moments = Moments()
    for part in features.split(block):
        moments.add(part)
    return moments.statistics()


@dataclass(frozen=True)
class Figure:
    """A value with its standard error and its 95 % interval; the latter two are None where no image is known."""

    value: float
    error: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ({self.low:.4g} … {self.high:.4g})"


def distance_from(reference: Statistics) -> Callable[[Statistics], float]:
    """The Fréchet distance ‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2 (Σ₁^½ Σ₂ Σ₁^½)^½) from one side, whose root is taken once.

    In float64. The eigenvalues under the root are those of a symmetric matrix: real, and right for singular covariances
    as well. torchmetrics' own takes those of Σ₁Σ₂, which is not symmetric, and wants the features of torch-fidelity.

    >>> normal = Statistics(torch.zeros(2).double(), torch.eye(2).double(), 10)
    >>> distance_from(normal)(Statistics(torch.ones(2).double(), 4 * torch.eye(2).double(), 10))
    4.0
    """
    values, vectors = torch.linalg.eigh(reference.covariance)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T

    def distance(other: Statistics) -> float:
        if other.width != reference.width:
            raise ValueError(f"features of {other.width} and of {reference.width} numbers are from different networks")
        shared = torch.linalg.eigvalsh(root @ other.covariance @ root).clamp_min(0).sqrt().sum()
        traces = reference.covariance.trace() + other.covariance.trace()
        return not_below_zero(((reference.mean - other.mean).square().sum() + traces - 2 * shared).item())

    return distance


def frechet_figure(reference: Statistics, features: Tensor, groups: int = GROUPS) -> Figure:
    """The Fréchet distance of images from a reference. Shape: features (N, D).

    The interval leaves out one group of images at a time. A bootstrap would not do: taking an image twice lowers the
    rank of the covariance, and raises the distance by more than the interval is wide.
    """
    if features.shape[1] != reference.width:
        raise ValueError(f"features have {features.shape[1]} numbers and the reference {reference.width}")
    check_finite(features)
    parts = shuffled(features).chunk(min(groups, len(features) // 2))
    # Both give the same; the cost is that of one matrix as wide as there are features, or images.
    distances = distances_by_gram if len(features) <= reference.width else distances_by_covariance
    whole, *left_out = distances(reference, parts)
    return jackknife(whole, left_out)


def distances_by_covariance(reference: Statistics, parts: Sequence[Tensor]) -> Iterator[float]:
    """The distance of all parts together, then without each. Shape: parts (B, D)."""
    total, distance = Moments(), distance_from(reference)
    for part in parts:
        total.add(part)
    yield distance(total.statistics())
    for part in parts:
        yield distance(total.without(Moments().add(part)).statistics())


def distances_by_gram(reference: Statistics, parts: Sequence[Tensor]) -> Iterator[float]:
    """The same from G = X Σ Xᵀ: centred, it has the eigenvalues that the product of the covariances has."""
    x = torch.cat(list(parts)).double() - reference.mean
    gram, trace = x @ reference.covariance @ x.T, reference.covariance.trace()
    yield distance_by_gram(x, gram, trace)
    part_of = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part) for part in parts]))
    for number in range(len(parts)):
        kept = part_of != number
        yield distance_by_gram(x[kept], gram[kept][:, kept], trace)


def distance_by_gram(x: Tensor, gram: Tensor, trace: Tensor) -> float:
    """Shape: x (N, D) less the reference's mean, gram (N, N)."""
    centred = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
    shared = torch.linalg.eigvalsh(centred / (len(x) - 1)).clamp_min(0).sqrt().sum()
    mean = x.mean(0)
    spread = (x - mean).square().sum() / (len(x) - 1)
    return not_below_zero((mean.square().sum() + trace + spread - 2 * shared).item())


def not_below_zero(distance: float) -> float:
    """Of two equal sets rounding leaves something like −1e-12; what is no number stays none."""
    return 0.0 if distance < 0 else distance


def shuffled(features: Tensor) -> Tensor:
    """In an order of its own, always the same: datasets are often sorted, and groups must be alike."""
    return features[random_order(len(features))]


def random_order(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def jackknife(value: float, left_out: Sequence[float]) -> Figure:
    """The interval of a value from those of all but one group at a time, with Student's quantile."""
    groups = len(left_out)
    spread = torch.tensor(left_out, dtype=torch.float64).var(correction=0).item()
    return with_error(value, math.sqrt((groups - 1) * spread), groups - 1)


def with_error(value: float, error: float, freedom: int) -> Figure:
    """The interval of a value with Student's quantile.

    >>> print(with_error(0.0, 1.0, freedom=9))
    0 (-2.262 … 2.262)
    """
    from scipy.special import stdtrit

    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    return Figure(value, error, value - half, value + half)


def kernel_distance(real: Tensor, generated: Tensor, subset: int | None = None) -> Figure:
    """KID: the squared maximum mean discrepancy with the kernel (x·y/D + 1)³, unbiased, so it may be below 0.

    The mean over disjoint subsets: they are independent, which random ones are not, so their spread gives the error of
    the mean. Shape: (N, D), (M, D).
    """
    size = min(len(real), len(generated))
    subset = subset or max(2, min(SUBSET, size // SUBSETS))
    if size < 2 * subset:
        raise ValueError(f"the KID needs at least two subsets of {subset} images of each kind, not {size} images")
    estimate, count = import_kid(), size // subset
    reals, others = (shuffled(features)[: count * subset].double().split(subset) for features in (real, generated))
    values = torch.tensor([float(estimate(*pair)) for pair in zip(reals, others, strict=True)], dtype=torch.float64)
    return with_error(values.mean().item(), values.std().item() / math.sqrt(count), count - 1)


def inception_score(features: Tensor, classifier: Tensor, splits: int = SPLITS) -> tuple[Figure, Figure]:
    """Salimans et al. (2016): exp of the mean of KL(p(y|x) ‖ p(y)), its mean over splits and its deviation.

    Shape: features (N, D), classifier (classes, D). torchmetrics' own draws the splits from the global random state.
    """
    if len(features) < splits:
        raise ValueError(f"the Inception Score needs at least {splits} images, not {len(features)}")
    scores = []
    for part in shuffled(features).tensor_split(splits):
        logs = (part.double() @ classifier.double().T).log_softmax(1)
        marginal = logs.logsumexp(0) - math.log(len(logs))
        scores.append((logs.exp() * (logs - marginal)).sum(1).mean().exp())
    found = torch.stack(scores)
    mean, error = found.mean().item(), found.std().item() / math.sqrt(splits)
    return with_error(mean, error, splits - 1), Figure(found.std(correction=0).item())


def import_kid() -> Any:
    """torchmetrics' discrepancy of two equally large sets; its class around it asks for torch-fidelity's network."""
    try:
        from torchmetrics.image.kid import poly_mmd
    except ImportError as error:
        raise ImportError('the KID needs torchmetrics: pip install "scalelong[eval]"') from error
    return poly_mmd


def check_libraries() -> None:
    """Raise where a library that the figures need is not installed: before images are sampled, not after."""
    import_kid()
    if importlib.util.find_spec("scipy") is None:
        raise ImportError('the intervals need scipy: pip install "scalelong[eval]"')
