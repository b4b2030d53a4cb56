"""Precision: runs of one process choose theirs each, and overflows of fp16 are the scaler's affair."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from run_cases import assert_same_run, lasting_metrics, losses, make_trainer, run_tiny

from scalelong.training import Trainer
from scalelong.training.parallel import Parallel
from scalelong.utils.runtime import resolve_precision

# Far more than fp16 can hold; halved at every overflow.
HUGE = 2.0**30


def test_runs_of_one_process_may_differ_in_precision(tmp_path: Path) -> None:
    for name, precision in (("first", "fp32"), ("half", "bf16"), ("again", "fp32")):
        run_tiny(tmp_path / name, f"training.precision={precision}")
    assert_same_run(tmp_path / "again", tmp_path / "first")
    assert losses(tmp_path / "half") != losses(tmp_path / "first")
    # 2^-7: bfloat16 has 8 significant bits.
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "first"), rel=2**-7)


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_on_a_processor_that_has_it(native: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert resolve_precision("auto", "cpu") == expected
    assert resolve_precision("fp32", "cpu") == "fp32"


def test_a_torch_that_cannot_say_has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert resolve_precision("auto", "cpu") == "fp32"


def test_fp16_is_refused_on_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="training.precision: fp16 needs a GPU"):
        run_tiny(tmp_path / "run", "training.precision=fp16")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in fp16 on the CPU with torch's own scaler, as on a GPU."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr("scalelong.training.parallel.resolve_precision", lambda *names: "fp16")
    monkeypatch.setattr(Parallel, "build_scaler", lambda self: scaler("cpu", init_scale=HUGE))


def events(out: Path) -> list[str]:
    return [line["event"] for line in lasting_metrics(out) if "event" in line]


def spoil_gradients(trainer: Trainer) -> None:
    trainer.parameters[0].register_hook(lambda gradient: gradient * math.inf)


@pytest.mark.usefixtures("fp16")
def test_overflows_halve_the_scale_and_are_not_counted_as_non_finite(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.max_skipped=1", "training.steps=30")
    assert trainer.train().finished
    found = events(tmp_path)
    assert set(found) == {"overflow"}
    assert 1 < len(found) < 30
    scales = [line["scale"] for line in lasting_metrics(tmp_path) if "event" in line]
    assert scales == [HUGE / 2**halvings for halvings in range(1, len(found) + 1)]
    assert trainer.state.ema.step == 30 - len(found)


@pytest.mark.usefixtures("fp16")
def test_a_run_in_fp16_goes_on_with_its_scale_to_the_bit(tmp_path: Path) -> None:
    run_tiny(tmp_path / "whole", "training.steps=30")
    run_tiny(tmp_path / "parts", "training.steps=4")
    run_tiny(tmp_path / "parts", "training.steps=30")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.usefixtures("fp16")
def test_gradients_that_no_scale_makes_finite_are_the_guards_affair(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.max_skipped=5")
    trainer.state.scaler.load_state_dict({**trainer.state.scaler.state_dict(), "scale": 4.0})
    spoil_gradients(trainer)
    trainer.begin()
    for _ in range(4):
        trainer.advance()
    assert events(tmp_path) == ["overflow", "overflow", "skipped", "skipped"]


@pytest.mark.usefixtures("fp16")
def test_a_non_finite_loss_is_the_guards_affair_at_any_scale(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.network.register_forward_hook(lambda module, args, output: output * math.nan)
    trainer.begin()
    trainer.advance()
    assert events(tmp_path) == ["skipped"]
