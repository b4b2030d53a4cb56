"""Runs of different methods start from the same shared weights and see the same batches, times and noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comparison_cases import tiny_plan
from torch import Tensor

from scalelong.runs import Run, find_resume_point
from scalelong.skips import METHODS
from scalelong.training import Trainer
from scalelong.training.loss import DiffusionLoss, NoisyBatch
from scalelong.training.parallel import Parallel

OWN = "skip_scaling."
"""The name before whatever a method adds to the network."""


def seen_by(
    method: str, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[dict[str, Tensor], list[NoisyBatch]]:
    """The weights of a run before its first step, and all that it was shown."""
    plan = tiny_plan(method, seeds=2, more=("training.steps=6", *more))
    config, seen = plan.runs[-1].config, []
    draw = DiffusionLoss.sample_noise

    def spy(self: DiffusionLoss, batch: object) -> NoisyBatch:
        seen.append(draw(self, batch))  # type: ignore[arg-type]
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(DiffusionLoss, "sample_noise", spy)
        run = Run(out / method)
        trainer = Trainer(config, run, find_resume_point(run, config), Parallel.open(config.training))
        weights = {name: tensor.clone() for name, tensor in trainer.network.state_dict().items()}
        trainer.train()
    return weights, seen


@pytest.mark.parametrize("method", [name for name in METHODS if name != "none"])
def test_shared_weights_are_equal_to_the_bit_at_the_start(method: str) -> None:
    from scalelong.config import build_model

    base, other = (build_model(tiny_plan(name).runs[-1].config).state_dict() for name in ("none", method))
    shared = {name for name in other if OWN not in name}
    assert shared == set(base)
    assert all(torch.equal(base[name], other[name]) for name in shared)
    assert any(OWN in name for name in other)


def test_a_method_is_trained_on_the_same_images_times_and_noise_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, base = seen_by("none", tmp_path, monkeypatch)
    for method in ("cs", "ls"):
        others, shown = seen_by(method, tmp_path, monkeypatch)
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert len(base) == len(shown) == 6
        for one, other in zip(base, shown, strict=True):
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.times, other.times)
            assert torch.equal(one.noise, other.noise)
    assert not torch.equal(base[0].noise, base[1].noise), "equal for the wrong reason"


def test_another_seed_starts_elsewhere_and_sees_other_batches() -> None:
    from scalelong.config import build_model

    first, second = (run.config for run in tiny_plan("none").runs)
    assert first.seed != second.seed
    one, other = (build_model(config).state_dict() for config in (first, second))
    assert not all(torch.equal(one[name], other[name]) for name in one)
