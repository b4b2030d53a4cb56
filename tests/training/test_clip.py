"""AdaGC: every tensor's gradient is clipped to the norm that it usually has."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest
import torch
from run_cases import SignalAt, assert_same_run, final_tensors, make_trainer, run_tiny
from torch import Tensor, nn

from scalelong.runs import Run
from scalelong.training import clip
from scalelong.training.clip import DECAY, AdaptiveClip

RATIO = 1.05


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The averages begin with three steps instead of a hundred."""
    monkeypatch.setattr(clip, "START", 3)


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def step(clipper: AdaptiveClip, tensors: list[nn.Parameter], *norms: float, limit: float = math.inf) -> list[float]:
    """The norms of the gradients after clipping, of gradients with these norms."""
    for tensor, norm in zip(tensors, norms, strict=True):
        tensor.grad = torch.full_like(tensor, norm / math.sqrt(tensor.numel()))
    total = clipper(tensors, limit)
    assert total.item() == pytest.approx(math.hypot(*norms), nan_ok=True)
    return [tensor.grad.norm().item() for tensor in tensors]  # type: ignore[union-attr]


def test_clipping_and_averages_are_those_of_the_definition_written_out() -> None:
    tensors = parameters(1, 4, 9)
    clipper, averages = AdaptiveClip(RATIO, tensors), [math.inf] * 3
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        norms = (3 * torch.rand(3, generator=generator) + 0.1).tolist()
        if number < 3:
            share = min(1.0, 1.0 / math.hypot(*norms))
            expected = [share * norm for norm in norms]
            averages = [min(pair) for pair in zip(averages, expected, strict=True)]
        else:
            expected = [min(norm, RATIO * average) for norm, average in zip(norms, averages, strict=True)]
            averages = [DECAY * old + (1 - DECAY) * new for old, new in zip(averages, expected, strict=True)]
        assert step(clipper, tensors, *norms, limit=1.0) == pytest.approx(expected, rel=1e-5)
        assert clipper.norms.tolist() == pytest.approx(averages, rel=1e-5)


def settled(*norms: float) -> tuple[AdaptiveClip, list[nn.Parameter]]:
    tensors = parameters(*(3 for _ in norms))
    clipper = AdaptiveClip(RATIO, tensors)
    for _ in range(5):
        step(clipper, tensors, *norms)
    return clipper, tensors


def test_a_spike_of_one_tensor_is_cut_and_touches_no_other() -> None:
    clipper, tensors = settled(1.0, 100.0)
    assert step(clipper, tensors, 50.0, 100.0) == pytest.approx([RATIO, 100.0])
    assert clipper.norms.tolist() == pytest.approx([1 + 0.02 * 0.05, 100.0])


def test_gradients_that_fall_are_never_clipped() -> None:
    clipper, tensors = settled(1.0)
    for norm in (0.9, 0.8, 0.4):
        assert step(clipper, tensors, norm) == pytest.approx([norm])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_every_average_as_it_was(bad: float) -> None:
    clipper, tensors = settled(1.0, 2.0)
    before = clipper.norms
    step(clipper, tensors, bad, 2.0)
    assert torch.equal(clipper.norms, before)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_tensor_without_gradient_can_come_back(steps: int) -> None:
    tensors = parameters(3, 3)
    clipper = AdaptiveClip(RATIO, tensors)
    for _ in range(steps):
        step(clipper, tensors, 1.0, 0.0)
    tensors[1].grad = None
    clipper(tensors, math.inf)
    assert step(clipper, tensors, 1.0, 2.0) == pytest.approx([1.0, 2.0])
    assert clipper.norms.tolist() == pytest.approx([1.0, 2.0])


def test_the_averages_come_back_from_json_to_the_bit() -> None:
    tensors = parameters(3, 3)
    clipper = AdaptiveClip(RATIO, tensors)
    step(clipper, tensors, 1 / 3, 0.0)
    other = AdaptiveClip(RATIO, tensors)
    other.load_state_dict(json.loads(json.dumps(clipper.state_dict(), allow_nan=False)))
    assert (other.steps, other.norms.tolist()) == (1, clipper.norms.tolist())
    assert other.norms[1] == math.inf


def test_a_run_clips_the_gradients_that_its_optimiser_gets(tmp_path: Path) -> None:
    trainer, seen = make_trainer(tmp_path, "optim.adaptive_clip=1", "optim.clip_norm=0.01"), []

    def note(*_: object) -> None:
        seen.append([weight.grad.norm().item() for weight in trainer.parameters])

    trainer.state.optimizer.register_step_pre_hook(note)
    for _ in range(3):
        trainer.train_step()
    assert [math.hypot(*norms) for norms in seen] == pytest.approx([0.01] * 3, rel=1e-3)
    averages: Tensor = trainer.state.clip.norms  # type: ignore[union-attr]
    assert trainer.train_step().grad_norm > 0.1
    assert all(norm <= average * 1.001 for norm, average in zip(seen[-1], averages.tolist(), strict=True))
    assert math.hypot(*seen[-1]) < 0.011


def test_a_run_that_was_stopped_goes_on_with_its_averages(tmp_path: Path) -> None:
    overrides = ("optim.adaptive_clip=1.05", "optim.clip_norm=null")
    assert run_tiny(tmp_path / "stopped", *overrides, display=SignalAt(5, signal.SIGTERM)).step == 5
    run_tiny(tmp_path / "stopped", *overrides)
    run_tiny(tmp_path / "whole", *overrides)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    run_tiny(tmp_path / "unclipped", "optim.clip_norm=null")
    whole, unclipped = final_tensors(tmp_path / "whole"), final_tensors(tmp_path / "unclipped")
    assert not all(torch.equal(whole[name], tensor) for name, tensor in unclipped.items())


def test_a_run_without_it_keeps_nothing_of_it(tmp_path: Path) -> None:
    run_tiny(tmp_path)
    checkpoint = Run(tmp_path).checkpoints().latest()
    assert checkpoint is not None and "clip" not in checkpoint.state()
