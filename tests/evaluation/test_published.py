"""Published statistics: read as they were made, and refused in one line where they cannot be what is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_cases import gaussians, inception_file, smooth_images, tiny_network, tiny_run

from scalelong.evaluation import NotComparable, Plan, evaluate_run, load_features, load_reference, networks
from scalelong.evaluation import features as feature_networks
from scalelong.evaluation.evaluate import figures_of, open_reference
from scalelong.evaluation.features import FeatureError
from scalelong.evaluation.inception import SPATIAL, FIDInception
from scalelong.evaluation.metrics import statistics_of
from scalelong.evaluation.networks import RESIZES
from scalelong.evaluation.reference import StatisticsError
from scalelong.evaluation.results import check_reference

pytest.importorskip("torchmetrics")
np = pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"inception:{inception_file(tmp_path_factory.mktemp('inception') / 'weights.pth')}"


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Random weights are taken for the released ones, and go through the network four images at a time."""
    monkeypatch.setattr(networks, "sha256_of", lambda path: "6726825d" + "0" * 56)
    monkeypatch.setattr(feature_networks, "BATCH", 4)
    monkeypatch.chdir(tmp_path)


def like_inception(how: str = "pytorch-fid") -> Any:
    """What the released Inception says of itself, with features of 16 numbers."""
    return replace(tiny_network("inception"), distance="FID", resize=str(RESIZES[how]))


def statistics(width: int, prefix: str = "", count: int = 64) -> dict[str, Any]:
    """Those of made-up features; with fewer of them than numbers, so that 2048 take no time."""
    features = torch.randn(count, width, generator=torch.Generator().manual_seed(width)).double().numpy()
    return {f"mu{prefix}": features.mean(0), f"sigma{prefix}": np.cov(features, rowvar=False)}


def batch(count: int = 8) -> Any:
    return smooth_images(count, 5).permute(0, 2, 3, 1).contiguous().numpy()


@pytest.mark.parametrize("how", RESIZES)
def test_a_plain_file_gives_the_distance_of_the_resize_that_is_asked_for(how: str, weights: str) -> None:
    np.savez("plain.npz", **statistics(2048))
    network = load_features(weights, how)
    reference = open_reference(Path("plain.npz"), network)
    found = figures_of(network(smooth_images(10, 0)), reference, network)
    score = [] if how == "clean" else ["IS", "IS-std"]
    assert list(found) == ["FID-clean" if how == "clean" else "FID", *score]


def test_a_batch_of_adm_gives_every_figure_of_its_evaluator(weights: str, tmp_path: Path) -> None:
    np.savez("adm.npz", arr_0=batch(), **statistics(2048), mu_s=np.zeros(SPATIAL), sigma_s=np.eye(SPATIAL))
    run = tiny_run(tmp_path / "run")
    plan = Plan(12, ("ema",), weights, Path("adm.npz"), resize="tf1")
    ((found,), (again,)) = evaluate_run(run, plan), evaluate_run(run, plan)
    assert list(found.figures) == ["FID", "sFID", "KID", "precision", "recall", "IS", "IS-std"]
    assert found.fingerprint["resize"] == "bilinear to 299 px as TensorFlow 1"
    assert found.fingerprint["reference_images"] is None
    assert again == found, "what was described is found again"
    network = load_features(weights, "tf1")
    assert network.with_spatial is not None
    # Their own statistics are taken, and their images for what needs images.
    reference = open_reference(Path("adm.npz"), network)
    assert torch.equal(reference.statistics.mean, torch.from_numpy(statistics(2048)["mu"]))
    assert reference.features is not None
    both = network.with_spatial(torch.from_numpy(batch()).permute(0, 3, 1, 2))
    pooled, spatial = both.split([2048, SPATIAL], 1)
    assert torch.allclose(reference.features.sort(0).values, pooled.sort(0).values, rtol=1e-4, atol=1e-5)
    figures = figures_of(torch.cat([both, both]), reference, network)
    # From the normal distribution, by the deviations along the principal axes of so few images.
    centred = torch.cat([spatial - spatial.mean(0)] * 2).double().numpy()
    deviations = np.linalg.svd(centred, compute_uv=False) / 15**0.5
    expected = spatial.double().mean(0).square().sum().item() + SPATIAL + (deviations**2).sum() - 2 * deviations.sum()
    assert figures["sFID"].value == pytest.approx(expected, rel=1e-6)


def test_spatial_features_are_the_first_channels_of_the_branch_that_tensorflow_calls_mixed_6() -> None:
    torch.manual_seed(0)
    network, images = FIDInception().eval(), torch.rand(1, 3, 299, 299) * 2 - 1
    with torch.no_grad():
        x = images
        for name, part in network.named_children():
            if name == "Mixed_6d":
                break
            x = part(x)
        expected = network.Mixed_6d.get_submodule("branch1x1")(x)[:, :7]
        pooled, found = network.with_spatial(images).split([2048, 2023], 1)
        assert torch.allclose(pooled, network(images))
    assert torch.equal(found.view(17, 17, 7), expected[0].permute(1, 2, 0))


def test_images_without_statistics_are_described_by_any_network() -> None:
    np.savez("images.npz", arr_0=batch(20))
    network = tiny_network()
    reference = open_reference(Path("images.npz"), network)
    expected = statistics_of(network(torch.from_numpy(batch(20)).permute(0, 3, 1, 2)))
    assert torch.allclose(reference.statistics.mean, expected.mean, rtol=1e-6)
    assert reference.statistics.count == 20 and reference.features is not None
    check_reference(reference, network)
    with pytest.raises(NotComparable, match="reference's weights is 'weights-0'"):
        check_reference(reference, tiny_network(seed=1))


def refused(name: str, network: Any, message: str, kind: type[ValueError] = StatisticsError) -> None:
    with pytest.raises(kind, match=message) as error:
        open_reference(Path(name), network)
    assert "\n" not in str(error.value)


def test_a_batch_of_adm_is_refused_with_another_resize_or_network() -> None:
    np.savez("adm.npz", **statistics(16), **statistics(SPATIAL, "_s"))
    is_said = "reference's resize is 'bilinear to 299 px as TensorFlow 1', .* is 'bilinear to 299 px': use --resize tf1"
    refused("adm.npz", like_inception(), is_said, NotComparable)
    refused("adm.npz", like_inception("clean"), "use --resize tf1", NotComparable)
    refused("adm.npz", tiny_network(), "reference's network is 'inception', .* is 'tiny'", NotComparable)
    open_reference(Path("adm.npz"), like_inception("tf1"))
    other = replace(like_inception("tf1"), distance="FD-Inception")
    refused("adm.npz", other, "network is 'inception' with the released weights", NotComparable)


def test_the_scores_name_says_that_it_is_of_the_released_weights(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_features(weights).classifier is not None
    assert load_features(weights).distance == "FID"
    monkeypatch.setattr(networks, "sha256_of", lambda path: "0" * 64)
    other = load_features(weights)
    assert (other.distance, other.classifier) == ("FD-Inception", None), "no Inception Score of other weights"


def test_features_of_another_width_are_refused(weights: str) -> None:
    np.savez("block.npz", **statistics(192))
    said = "the reference has 192 features, and inception has 2048"
    refused("block.npz", load_features(weights), said, NotComparable)
    np.savez("spatial.npz", **statistics(16), **statistics(768, "_s"))
    refused("spatial.npz", like_inception("tf1"), "has 768 spatial features, and the sFID has 2023", NotComparable)


ASKEW = np.eye(2) + np.array([[0, 0.01], [0, 0]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"feats": np.zeros((5, 2))}, "wrong.npz has no arrays mu and sigma, but feats"),
        ({"mu": np.zeros(2), "sigma": np.eye(2), "mu_s": np.zeros(2)}, "has no arrays mu_s and sigma_s, but mu, sigma"),
        ({"mu": np.zeros(2), "sigma": np.full((2, 2), np.inf)}, "mu or sigma is not finite"),
        ({"mu": np.zeros(2), "sigma": ASKEW}, "sigma is not symmetric, so it is no covariance"),
        ({"mu": np.zeros(0), "sigma": np.zeros((0, 0))}, r"are \(0,\) and \(0, 0\), not"),
        ({"mu": np.array(["1"]), "sigma": np.eye(1)}, "mu is <U1, not numbers"),
        ({"mu": np.array([{}]), "sigma": np.eye(1)}, "not an .npz that can be read: .*allow_pickle=False"),
        ({"arr_0": np.zeros((2, 4, 4, 3))}, r"arr_0 is float64 \(2, 4, 4, 3\), and images would be uint8"),
        ({"arr_0": np.zeros((2, 3), "uint8")}, r"arr_0 is uint8 \(2, 3\), and images would be uint8 \(N, H, W, 3\)"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(arrays: dict[str, Any], message: str) -> None:
    np.savez("wrong.npz", **arrays)
    refused("wrong.npz", like_inception("tf1"), message)


def test_a_covariance_that_was_rounded_to_float32_is_read() -> None:
    features = gaussians(100, 8, 0, stretch=1.0).numpy()
    np.savez("rounded.npz", mu=features.mean(0, dtype="float32"), sigma=np.cov(features.astype("float32").T))
    np.savez("askew.npz", mu=features.mean(0), sigma=np.cov(features.T) * (1 + 1e-7 * np.arange(8)))
    assert load_reference("rounded.npz").statistics.mean.dtype == torch.float64
    load_reference("askew.npz")


def test_a_resize_is_the_inceptions_alone_and_one_of_three(weights: str) -> None:
    with pytest.raises(FeatureError, match="--resize is for --network inception: efficientnet-lite0 has a resize of"):
        load_features("efficientnet-lite0", "clean")
    with pytest.raises(FeatureError, match="--resize is one of pytorch-fid, tf1, clean, not 'nearest'"):
        load_features(weights, "nearest")
