"""Fréchet distance, KID, precision and recall: what they equal, what they are near, and how wide the intervals are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from evaluation_cases import gaussians

from scalelong.evaluation.manifold import all_radii, coverage, precision_recall, wilson
from scalelong.evaluation.metrics import (
    Figure,
    Statistics,
    distance_from,
    distances_by_covariance,
    distances_by_gram,
    frechet_figure,
    kernel_distance,
    statistics_of,
)

scipy_linalg = pytest.importorskip("scipy.linalg")


def by_matrix_root(first: Statistics, second: Statistics) -> float:
    """The distance as it is usually computed, by scipy's root of a matrix that is not symmetric."""
    root = scipy_linalg.sqrtm(first.covariance.numpy() @ second.covariance.numpy())
    means = (first.mean - second.mean).square().sum().item()
    return means + first.covariance.trace().item() + second.covariance.trace().item() - 2 * root.real.trace()


@pytest.mark.parametrize("width", [3, 24, 64])
def test_the_distance_equals_that_of_scipys_matrix_root(width: int) -> None:
    first = statistics_of(gaussians(1000, width, 0))
    second = statistics_of(gaussians(1000, width, 1, mean=0.3, stretch=0.5))
    assert distance_from(first)(second) == pytest.approx(by_matrix_root(first, second), rel=1e-6)


def test_the_distance_of_diagonal_gaussians_is_that_of_the_closed_form() -> None:
    mean, deviation = torch.linspace(-1, 1, 5).double(), torch.linspace(0.5, 2, 5).double()
    first = Statistics(torch.zeros(5).double(), torch.eye(5).double(), 10)
    second = Statistics(mean, deviation.square().diag(), 10)
    expected = (mean.square() + (deviation - 1).square()).sum().item()
    assert distance_from(first)(second) == pytest.approx(expected, rel=1e-12)
    assert distance_from(second)(first) == pytest.approx(expected, rel=1e-12)


def test_the_distance_of_singular_covariances_is_finite_and_right() -> None:
    line, other = torch.zeros(40, 30).double(), torch.zeros(40, 30).double()
    line[:, 0], other[:, 1] = torch.linspace(-1, 1, 40), torch.linspace(-1, 1, 40)
    first, second = statistics_of(line), statistics_of(other)
    # On orthogonal lines nothing can be shared: the traces remain.
    assert distance_from(first)(second) == pytest.approx(2 * first.covariance.trace().item(), rel=1e-6)
    assert distance_from(first)(first) == pytest.approx(0, abs=1e-7)
    few = statistics_of(gaussians(5, 30, 0))
    assert 0 < distance_from(few)(statistics_of(gaussians(5, 30, 1))) < float("inf")


@pytest.mark.parametrize("count", [16, 60])
def test_features_that_are_not_finite_give_no_distance(count: int) -> None:
    """By either way: with fewer images than features, and with more."""
    features = gaussians(count, 20, 1)
    features[3, 4] = float("nan")
    with pytest.raises(ValueError, match="features are not finite"):
        frechet_figure(statistics_of(gaussians(300, 20, 0)), features)


def test_a_distance_that_is_no_number_is_not_taken_for_zero() -> None:
    known = statistics_of(gaussians(50, 3, 0))
    unknown = Statistics(torch.full((3,), float("nan")).double(), known.covariance, 50)
    assert distance_from(known)(unknown) != 0


def test_fewer_images_than_features_give_the_same_distance_by_the_cheaper_way() -> None:
    reference = statistics_of(gaussians(300, 20, 0, mean=1))
    parts = gaussians(16, 20, 1, stretch=0.4).chunk(4)
    ours, theirs = (list(way(reference, parts)) for way in (distances_by_gram, distances_by_covariance))
    assert len(ours) == 5
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_features_of_another_width_are_refused() -> None:
    reference = statistics_of(gaussians(10, 4, 0))
    with pytest.raises(ValueError, match="different networks"):
        distance_from(reference)(statistics_of(gaussians(10, 5, 0)))
    with pytest.raises(ValueError, match="5 numbers and the reference 4"):
        frechet_figure(reference, gaussians(10, 5, 0))


def test_the_distance_of_the_same_kind_falls_with_the_number_of_images_as_one_over_it() -> None:
    reference = statistics_of(gaussians(20_000, 16, 0))
    means = []
    for count in (50, 200, 800):
        values = [distance_from(reference)(statistics_of(gaussians(count, 16, 1 + seed))) for seed in range(8)]
        means.append(sum(values) / 8)
    ratios = [means[0] / means[1], means[1] / means[2]]
    assert all(3 < ratio < 5.5 for ratio in ratios), f"{means}: bias should be a quarter for four times the images"


def share_covered(make: Callable[[int], Figure], repeats: int, truth: float | None = None) -> float:
    """How often the interval holds the expected value; that is the mean over all draws where it is not known."""
    figures = [make(seed) for seed in range(repeats)]
    target = sum(figure.value for figure in figures) / repeats if truth is None else truth
    return sum((figure.low or 0.0) <= target <= (figure.high or 0.0) for figure in figures) / repeats


# Of 150 intervals that are right in 95 % of cases, at least 90 % are right with a probability of more than 0.99.
LEAST, REPEATS = 0.90, 150


@pytest.mark.parametrize("mean", [0.0, 0.4])
def test_the_interval_of_the_distance_covers_what_other_draws_give(mean: float) -> None:
    reference = statistics_of(gaussians(5000, 8, 7))
    share = share_covered(
        lambda seed: frechet_figure(reference, gaussians(400, 8, 100 + seed, mean=mean, stretch=mean)), REPEATS
    )
    assert share >= LEAST


def test_the_interval_of_the_distance_is_not_too_wide_either() -> None:
    reference = statistics_of(gaussians(5000, 8, 7))
    figures = [frechet_figure(reference, gaussians(400, 8, 100 + seed, mean=0.4)) for seed in range(60)]
    spread = torch.tensor([figure.value for figure in figures]).std().item()
    errors = sum(figure.error or 0.0 for figure in figures) / 60
    assert 0.7 < errors / spread < 1.4


def test_the_kernel_distance_is_unbiased_and_its_interval_covers_zero_for_the_same_kind() -> None:
    pytest.importorskip("torchmetrics")

    sets = [(gaussians(200, 8, 2 * seed), gaussians(200, 8, 2 * seed + 1)) for seed in range(REPEATS)]
    figures = [kernel_distance(*pair) for pair in sets]
    values = torch.tensor([figure.value for figure in figures])
    assert abs(values.mean()) < 3 * values.std() / REPEATS**0.5
    assert values.min() < 0 < values.max()
    assert share_covered(figures.__getitem__, REPEATS, truth=0.0) >= LEAST


def test_the_kernel_distance_of_too_few_images_is_refused() -> None:
    with pytest.raises(ValueError, match="two subsets of 6 images"):
        kernel_distance(gaussians(11, 5, 0), gaussians(20, 5, 1), subset=6)


def test_precision_and_recall_are_one_for_the_same_images_and_zero_for_distant_ones() -> None:
    real = gaussians(50, 4, 0)
    assert [figure.value for figure in precision_recall(real, real)] == [1.0, 1.0]
    assert [figure.value for figure in precision_recall(real, real + 100)] == [0.0, 0.0]


def test_lost_modes_lower_recall_and_images_off_the_data_lower_precision() -> None:
    modes = torch.tensor([[0.0] * 4, [50.0] * 4], dtype=torch.float64)
    real = torch.cat([gaussians(100, 4, seed) + mode for seed, mode in enumerate(modes)])
    one_mode = gaussians(200, 4, 5) + modes[0]
    precision, recall = precision_recall(real, one_mode)
    assert precision.value > 0.7 and recall.value <= 0.5
    half_off = torch.cat([real[::2] + 1e-9, gaussians(100, 4, 6) - 500])
    precision, recall = precision_recall(real, half_off)
    assert precision.value == 0.5 and recall.value > 0.7


def test_radii_without_a_group_are_those_of_the_other_points_alone() -> None:
    points = gaussians(30, 3, 0)
    radii = all_radii(points, 3, 5, 1 << 20)
    assert torch.equal(radii[0], all_radii(points, 3, 1, 1 << 20)[0])
    rest = torch.cat([points[:6], points[12:]])
    alone = all_radii(rest, 3, 1, 1 << 20)[0]
    assert torch.allclose(torch.cat([radii[2][:6], radii[2][12:]]), alone, rtol=1e-12)
    assert (radii[2][6:12] == -1).all()
    assert not coverage(points[6:7], points[6:7], radii[2:3, 6:7], 10).any()


def test_the_intervals_of_precision_and_recall_cover_what_other_draws_give() -> None:
    real = gaussians(200, 4, 7)
    pairs = [precision_recall(real, gaussians(200, 4, 100 + seed, mean=0.5)) for seed in range(REPEATS)]
    for index in (0, 1):
        assert share_covered(lambda seed, index=index: pairs[seed][index], REPEATS) >= LEAST


def test_too_few_images_for_a_manifold_are_refused() -> None:
    with pytest.raises(ValueError, match="8 generated images, not 7"):
        precision_recall(gaussians(20, 3, 0), gaussians(7, 3, 1))


def test_the_interval_of_a_share_is_wilsons_also_at_the_ends() -> None:
    # Newcombe (1998), table I: 15 of 148 has the interval 0.0624 … 0.1605.
    figure = wilson(15, 148)
    assert (figure.low, figure.high) == (pytest.approx(0.0624, abs=5e-5), pytest.approx(0.1605, abs=5e-5))
    none = wilson(0, 20)
    assert none.value == 0 and none.low == 0 and none.high == pytest.approx(0.1611, abs=5e-5)
