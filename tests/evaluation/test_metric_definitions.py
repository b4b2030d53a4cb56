"""Each metric of fixed features, and each resize, equals what its definition gives in plain numpy."""

from __future__ import annotations

import pytest
import torch
from evaluation_cases import gaussians, smooth_images
from torch import Tensor

from scalelong.evaluation import FeatureNetwork
from scalelong.evaluation.manifold import precision_recall
from scalelong.evaluation.metrics import frechet_figure, inception_score, kernel_distance, random_order, statistics_of
from scalelong.evaluation.networks import RESIZES

np = pytest.importorskip("numpy")


def distance_in_numpy(first, second) -> float:
    """Of two sets of features, by the eigenvalues of the product of their covariances."""
    means, covariances = zip(*((x.mean(0), np.cov(x, rowvar=False)) for x in (first, second)), strict=True)
    shared = np.sqrt(np.maximum(np.linalg.eigvals(covariances[0] @ covariances[1]).real, 0)).sum()
    return ((means[0] - means[1]) ** 2).sum() + sum(map(np.trace, covariances)) - 2 * shared


def test_the_inception_score_is_the_mean_and_the_deviation_over_ten_splits() -> None:
    features, classifier = gaussians(203, 6, 0), gaussians(9, 6, 1)
    logits = features.numpy() @ classifier.numpy().T
    odds = np.exp(logits - logits.max(1, keepdims=True))
    shares = (odds / odds.sum(1, keepdims=True))[random_order(203).numpy()]
    scores = []
    for part in np.array_split(shares, 10):
        divergence = (part * np.log(part / part.mean(0))).sum(1)
        scores.append(np.exp(divergence.mean()))
    score, deviation = inception_score(features, classifier)
    assert score.value == pytest.approx(np.mean(scores), rel=1e-12)
    assert deviation.value == pytest.approx(np.std(scores), rel=1e-9)
    # Student's quantile for nine degrees of freedom.
    half = 2.262157 * np.std(scores, ddof=1) / 10**0.5
    assert (score.low, score.high) == (pytest.approx(score.value - half), pytest.approx(score.value + half))


def test_the_inception_score_is_one_for_equal_classes_and_their_number_for_certain_ones() -> None:
    certain = 1000 * torch.eye(4).repeat(100, 1)
    score, deviation = inception_score(certain[:, :1] * 0, torch.ones(4, 1))
    assert (score.value, deviation.value) == (pytest.approx(1), pytest.approx(0))
    # Not every split has as many of each class.
    assert inception_score(certain, torch.eye(4))[0].value == pytest.approx(4, rel=0.1)


def test_the_inception_score_of_too_few_images_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 10 images, not 9"):
        inception_score(torch.zeros(9, 2), torch.zeros(3, 2))


@pytest.mark.parametrize("count", [10, 80])
def test_the_distance_is_that_of_the_definition(count: int) -> None:
    """By either way: with fewer images than features, and with more."""
    real, generated = gaussians(90, 20, 0), gaussians(count, 20, 1, mean=0.3, stretch=0.4)
    expected = distance_in_numpy(real.numpy(), generated.numpy())
    assert frechet_figure(statistics_of(real), generated).value == pytest.approx(expected, rel=1e-6)


def test_the_kernel_distance_is_the_unbiased_estimate_with_the_cubic_kernel() -> None:
    pytest.importorskip("torchmetrics")
    real, generated = gaussians(40, 5, 0), gaussians(40, 5, 1, mean=0.5)
    order = random_order(40).numpy()
    values = []
    for own in order.reshape(4, 10):
        x, y = real.numpy()[own], generated.numpy()[own]
        xx, yy, xy = ((a @ b.T / 5 + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
        apart = ~np.eye(10, dtype=bool)
        values.append(xx[apart].mean() + yy[apart].mean() - 2 * xy.mean())
    assert kernel_distance(real, generated, subset=10).value == pytest.approx(np.mean(values), rel=1e-9)


@pytest.mark.parametrize("pairs", [1, 1000, 1 << 25])
def test_blocks_of_any_size_give_the_precision_and_recall_of_the_definition(pairs: int) -> None:
    real, generated = gaussians(50, 3, 0), gaussians(60, 3, 1, mean=0.7)

    def share_inside(points, queries) -> float:
        between = np.linalg.norm(points[:, None] - points[None], axis=2)
        radii = np.sort(between, axis=1)[:, 3]  # The nearest of all is the point itself.
        return (np.linalg.norm(queries[:, None] - points[None], axis=2) <= radii).any(1).mean()

    precision, recall = precision_recall(real, generated, pairs=pairs)
    assert precision.value == share_inside(real.numpy(), generated.numpy())
    assert recall.value == share_inside(generated.numpy(), real.numpy())


def interpolate(image, places):
    """Bilinear interpolation at places of a square image, whose border goes on. Shape: (C, H, H), (P,) → (C, P, P)."""
    places = places.clip(0)
    before, share = places.astype(int), places - places.astype(int)
    after = (before + 1).clip(max=image.shape[-1] - 1)
    rows = (1 - share)[:, None] * image[:, before] + share[:, None] * image[:, after]
    return (1 - share) * rows[:, :, before] + share * rows[:, :, after]


def resize_in_numpy(images: Tensor, how: str):
    """As the network reads them. Shape: (B, 3, H, W), uint8 → (B, 3, 299, 299)."""
    found = []
    for image in images.numpy().astype(np.float64):
        side, places = image.shape[-1], np.arange(299.0)
        if how == "clean":
            pillow = pytest.importorskip("PIL.Image")
            channels = (pillow.fromarray(channel.astype(np.float32), mode="F") for channel in image)
            resized = np.stack([np.asarray(one.resize((299, 299), pillow.Resampling.BICUBIC)) for one in channels])
            found.append(resized.clip(0, 255))
        else:
            places = places * side / 299 if how == "tf1" else (places + 0.5) * side / 299 - 0.5
            found.append(interpolate(image, places))
    x = np.stack(found)
    return 2 * x / 255 - 1 if how == "pytorch-fid" else (x - 128) / 128


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
@pytest.mark.parametrize("side", [16, 320])
@pytest.mark.parametrize("how", RESIZES)
def test_each_resize_is_that_of_the_code_it_is_named_after(how: str, side: int) -> None:
    images = smooth_images(1, 0).repeat_interleave(side // 16, 2).repeat_interleave(side // 16, 3)
    # PIL counts in float64, and torch's kernel in float32: at most 0.01 of 255 grey levels.
    expected = torch.from_numpy(resize_in_numpy(images, how)).float()
    torch.testing.assert_close(RESIZES[how](images), expected, rtol=0, atol=0.01 / 128)


def test_the_three_resizes_are_three() -> None:
    found = [RESIZES[how](smooth_images(1, 0)) for how in RESIZES]
    assert min((first - second).abs().max() for first in found for second in found if first is not second) > 0.01
    assert len({str(resize) for resize in RESIZES.values()}) == 3


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", ["tf1", "clean"])
def test_the_distance_after_a_resize_is_that_of_the_definition(how: str) -> None:
    real, generated = smooth_images(8, 0), smooth_images(6, 1)

    def tiles(x: Tensor) -> Tensor:
        return x.unflatten(3, (13, 23)).unflatten(2, (13, 23)).mean((3, 5))[:, :, 6, :4].flatten(1)

    network = FeatureNetwork("inception", "0", str(RESIZES[how]), "FID", lambda images: tiles(RESIZES[how](images)))
    by_hand = [tiles(torch.from_numpy(resize_in_numpy(images, how))).numpy() for images in (real, generated)]
    found = frechet_figure(statistics_of(network(real)), network(generated)).value
    assert found == pytest.approx(distance_in_numpy(*by_hand), rel=1e-3)
