"""Statistics of features: streamed like at once, and files that pytorch-fid reads and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from evaluation_cases import gaussians, reference_of, tiny_network
from torch import Tensor

from scalelong.evaluation.metrics import Moments, distance_from, shuffled, statistics_of
from scalelong.evaluation.reference import Reference, StatisticsError, load_reference, pick, save_reference

np = pytest.importorskip("numpy")


@pytest.mark.parametrize("sizes", [[100], [1, 99], [33, 33, 34], [1] * 100, [0, 60, 0, 40]])
def test_mean_and_covariance_do_not_depend_on_the_parts_they_come_in(sizes: list[int]) -> None:
    features = gaussians(100, 6, 0, mean=3, stretch=0.5)
    moments = Moments()
    for part in features.split(sizes):
        moments.add(part)
    found = moments.statistics()
    assert found.count == 100
    assert torch.allclose(found.mean, features.mean(0), rtol=1e-13)
    assert torch.allclose(found.covariance, features.T.cov(), rtol=1e-11, atol=1e-13)


def test_taking_a_part_out_again_leaves_the_moments_of_the_rest() -> None:
    first, second = gaussians(40, 5, 0), gaussians(60, 5, 1, mean=2)
    both = Moments().add(first).add(second)
    rest = both.without(Moments().add(second)).statistics()
    assert rest.count == 40
    assert torch.allclose(rest.mean, first.mean(0), atol=1e-13)
    assert torch.allclose(rest.covariance, first.T.cov(), atol=1e-12)


def test_a_large_common_offset_does_not_drown_the_covariance() -> None:
    features = (gaussians(200, 4, 0) + 1e6).float()
    exact = features.double().T.cov()
    assert torch.allclose(statistics_of(features, block=32).covariance, exact, rtol=1e-9, atol=1e-9)


def test_features_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        Moments().add(torch.tensor([[1.0], [float("nan")]]))
    with pytest.raises(ValueError, match="at least two images, not 1"):
        Moments().add(torch.ones(1, 3)).statistics()


@pytest.fixture
def reference() -> Reference:
    return reference_of(gaussians(50, 7, 0), tiny_network())


def test_a_reference_is_read_back_to_the_bit(reference: Reference, tmp_path: Path) -> None:
    found = load_reference(save_reference(tmp_path / "deep" / "one.npz", reference))
    assert torch.equal(found.statistics.mean, reference.statistics.mean)
    assert torch.equal(found.statistics.covariance, reference.statistics.covariance)
    assert found.statistics.count == 50
    assert found.fingerprint == reference.fingerprint
    assert isinstance(found.features, Tensor) and isinstance(reference.features, Tensor)
    assert torch.equal(found.features, reference.features)


def test_pytorch_fid_reads_our_file(reference: Reference, tmp_path: Path) -> None:
    path = save_reference(tmp_path / "ours.npz", reference)
    # Its `compute_statistics_of_path`, which is these lines, cannot be imported without torchvision.
    with np.load(str(path)) as file:
        mean, covariance = file["mu"][:], file["sigma"][:]
    assert mean.dtype == covariance.dtype == np.float64
    features = gaussians(50, 7, 0).numpy()
    np.testing.assert_allclose(mean, np.mean(features, axis=0), rtol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(features, rowvar=False), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compress", [np.savez, np.savez_compressed])
def test_we_read_the_file_of_pytorch_fid(compress, tmp_path: Path) -> None:
    features = gaussians(50, 7, 0).numpy()
    compress(str(tmp_path / "theirs.npz"), mu=features.mean(0), sigma=np.cov(features, rowvar=False))
    found = load_reference(tmp_path / "theirs.npz")
    assert found.fingerprint == {} and found.features is None and found.statistics.count is None
    assert distance_from(found.statistics)(statistics_of(gaussians(50, 7, 0))) == pytest.approx(0, abs=1e-7)


def test_raw_features_that_do_not_belong_to_the_file_are_refused(reference: Reference, tmp_path: Path) -> None:
    path = save_reference(tmp_path / "one.npz", reference)
    np.save(tmp_path / "one.features.npy", np.zeros((50, 7), dtype=np.float32))
    with pytest.raises(StatisticsError, match="does not match one.npz: remove both"):
        load_reference(path)


def test_without_its_raw_features_a_file_still_gives_the_distance(reference: Reference, tmp_path: Path) -> None:
    path = save_reference(tmp_path / "one.npz", reference)
    (tmp_path / "one.features.npy").unlink()
    assert load_reference(path).features is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mu": np.zeros(3)}, "no arrays mu and sigma, but mu"),
        ({"mu": np.zeros(3), "sigma": np.zeros((2, 2))}, r"are \(3,\) and \(2, 2\), not"),
        ({"mu": np.full(2, np.nan), "sigma": np.eye(2)}, "not finite"),
    ],
)
def test_a_file_that_holds_no_statistics_is_refused_in_one_line(arrays, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(StatisticsError, match=message):
        load_reference(tmp_path / "wrong.npz")


def test_files_that_are_missing_or_damaged_are_named(reference: Reference, tmp_path: Path) -> None:
    with pytest.raises(StatisticsError, match="there are no statistics .*none.npz.*scalelong stats"):
        load_reference(tmp_path / "none.npz")
    path = save_reference(tmp_path / "cut.npz", reference)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(StatisticsError, match="cut.npz is not an .npz that can be read"):
        load_reference(path)


def test_a_compressed_file_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "theirs.npz"
    np.savez_compressed(path, mu=np.zeros(500), sigma=np.eye(500))
    content = bytearray(path.read_bytes())
    content[56:76] = b"\xff" * 20  # No compressed data looks like this.
    path.write_bytes(bytes(content))
    with pytest.raises(StatisticsError, match="theirs.npz is not an .npz that can be read"):
        load_reference(path)


def test_a_file_of_raw_features_is_not_taken_for_statistics(reference: Reference, tmp_path: Path) -> None:
    save_reference(tmp_path / "one.npz", reference)
    with pytest.raises(StatisticsError, match="one.features.npy is not an .npz .* it holds one array"):
        load_reference(tmp_path / "one.features.npy")


def test_features_kept_of_a_stream_are_those_kept_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelong.evaluation.reference.KEPT", 30)
    features = gaussians(100, 3, 0)
    assert torch.equal(pick(iter(features.split([1, 50, 20, 29])), 100), shuffled(features)[:30])


@pytest.mark.parametrize("fingerprint", ["", "{", "[1]", "3", "[" * 100_000])
def test_a_fingerprint_that_is_none_is_refused_with_the_name_of_the_file(tmp_path: Path, fingerprint: str) -> None:
    path = tmp_path / "broken.npz"
    np.savez(path, mu=np.zeros(2), sigma=np.eye(2), fingerprint=np.array(fingerprint))
    with pytest.raises(StatisticsError, match=r"broken\.npz does not say what it was made with"):
        load_reference(path)
