"""Precision and recall: which images lie within the other kind's manifold, each with a 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .metrics import CONFIDENCE, GROUPS, Figure, jackknife, shuffled

NEIGHBOURS = 3
# Distances of so many pairs are in memory at once: 128 MB in float32.
PAIRS = 1 << 25


def precision_recall(
    real: Tensor, generated: Tensor, *, neighbours: int = NEIGHBOURS, groups: int = GROUPS, pairs: int = PAIRS
) -> tuple[Figure, Figure]:
    """Kynkäänniemi et al. (2019): the share of images inside the other kind's manifold, the union of the balls that
    reach to each image's k-th neighbour. Shape: (N, D), (M, D); memory for `pairs` distances at once.

    torchmetrics has neither. Precision is a share of independent images; recall depends on all generated ones
    together, so groups of them are left out in turn.
    """
    for name, features in (("real", real), ("generated", generated)):
        if len(features) < 2 * (neighbours + 1):
            raise ValueError(f"precision and recall need {2 * (neighbours + 1)} {name} images, not {len(features)}")
    centre = real.mean(0)
    real, generated = real - centre, shuffled(generated - centre)
    inside = coverage(generated, real, all_radii(real, neighbours, 1, pairs), pairs)[0]
    groups = min(groups, len(generated) // (neighbours + 1))
    covered = coverage(real, generated, all_radii(generated, neighbours, groups, pairs), pairs)
    shares = covered.double().mean(1).tolist()
    recall = jackknife(shares[0], shares[1:])
    recall = replace(recall, low=max(0.0, recall.low or 0.0), high=min(1.0, recall.high or 0.0))
    return wilson(int(inside.sum()), len(inside)), recall


def all_radii(points: Tensor, neighbours: int, groups: int, pairs: int) -> Tensor:
    """Distance of each point to its k-th neighbour: of all, then without each group. Shape: (1 + groups, N).

    Points of the group that is left out have the radius −1, which nothing is within. One group is none.
    """
    bounds = [number * len(points) // groups for number in range(groups + 1)]
    members = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    found = []
    for start, distances in distances_in_parts(points, points, pairs):
        rows = torch.arange(len(distances))
        distances[rows, start + rows] = math.inf  # A point is no neighbour of its own.
        found.append(torch.stack([distances[:, own].topk(neighbours, largest=False).values for own in members], 1))
    nearest = torch.cat(found)  # To the nearest points of each group. Shape: (N, groups, k).
    radii = [nearest.flatten(1).kthvalue(neighbours, 1).values]
    for group, own in enumerate(members if groups > 1 else []):
        kept = torch.cat([nearest[:, :group], nearest[:, group + 1 :]], 1).flatten(1)
        radii.append(kept.kthvalue(neighbours, 1).values)
        radii[-1][own] = -1
    return torch.stack(radii)


def coverage(queries: Tensor, points: Tensor, radii: Tensor, pairs: int) -> Tensor:
    """Whether each query is within some point's radius, for each row of radii. Shape: (R, Q), bool."""
    parts = distances_in_parts(queries, points, pairs)
    return torch.cat([torch.stack([(near <= radius).any(1) for radius in radii]) for _, near in parts], 1)


def distances_in_parts(queries: Tensor, points: Tensor, pairs: int) -> Iterator[tuple[int, Tensor]]:
    """Distances of as many queries at once as fit, each part with where it starts. Shape: (B, N)."""
    size = max(1, pairs // len(points))
    for start in range(0, len(queries), size):
        yield start, torch.cdist(queries[start : start + size], points)


def wilson(hits: int, total: int) -> Figure:
    """The share of hits with Wilson's interval, which is right near 0 and 1 as well."""
    from scipy.stats import binomtest

    share, interval = hits / total, binomtest(hits, total).proportion_ci(CONFIDENCE, method="wilson")
    return Figure(share, math.sqrt(share * (1 - share) / total), float(interval.low), float(interval.high))
