"""`scalelong.why`: a collapse of a training loop that is not ours, replayed with one change at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import scalelong
from scalelong.compare.any_why import Trial
from scalelong.compare.causes import CHANGES
from scalelong.compare.methods import PlanError
from scalelong.models import UViT

BY_ID = {change.id: Trial(change) for change in CHANGES}


class Loop:
    """A loop whose loss goes up after 60 steps, except with some changes, or with some draws of the noise."""

    def __init__(
        self, *saved_by: str, lucky: tuple[int, ...] = (), ends: float = 0.95, poisoned: int | None = None
    ) -> None:
        self.saved_by, self.lucky, self.ends, self.poisoned = saved_by, lucky, ends, poisoned
        self.replays: list[tuple[str, int]] = []
        self.yielded = 0

    def __call__(self, trial: Trial, draw: int) -> Iterator[float]:
        self.replays.append((trial.change.id, draw))
        saved = trial.change.id in self.saved_by or draw in self.lucky or self.poisoned in trial.leave_out
        for step in range(400):
            self.yielded += 1
            if step == self.poisoned and not saved:
                yield 40.0
            yield 0.2 + 0.01 * (step % 3) if step < 60 or saved else self.ends


def test_what_saves_the_loop_is_named_and_each_replay_is_made_once() -> None:
    loop = Loop("lr-half", "lr-quarter")
    found = scalelong.why(loop)
    assert found.groups == ("rate",) and "Only a change of the rate saves the run (0 of 4" in str(found)
    assert len(set(loop.replays)) == len(loop.replays)
    assert loop.replays.count(("beta2", 0)) == 1 and ("beta2", 1) not in loop.replays, "it is plain after one"


@pytest.mark.parametrize("ends", [0.95, math.nan])
def test_a_replay_that_is_lost_is_stopped(ends: float) -> None:
    loop = Loop(ends=ends)
    assert scalelong.why(loop, groups=["rate"]).groups == ()
    assert loop.yielded < 200 * len(loop.replays)


def test_a_collapse_that_other_noise_escapes_is_called_chance() -> None:
    assert "was chance: 6 of 8 replays" in str(scalelong.why(Loop(lucky=(1, 2, 3, 5, 6, 7)), groups=["rate"]))


def test_batches_that_stood_out_are_left_out_where_the_loop_says_that_it_can() -> None:
    loop = Loop(poisoned=60)
    assert scalelong.why(loop, groups=["data", "rate"]).groups == ("data",)
    assert ("order", 0) in loop.replays and ("batches", 2) in loop.replays


def test_with_a_file_the_same_call_goes_on_and_another_question_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "why.json"
    first = scalelong.why(Loop("beta2"), file=file)
    again = Loop("beta2")
    assert str(scalelong.why(again, file=file)) == str(first) and not again.replays
    assert json.loads(file.read_bytes())["replays"]["beta2 0"]["saved"] is True
    with pytest.raises(PlanError, match=r"holds replays for nothing=1\.0, not 2\.0: name another"):
        scalelong.why(again, nothing=2.0, file=file)


@pytest.mark.parametrize("options", [{"groups": ["rates"]}, {"groups": []}, {"replays": 0}])
def test_what_cannot_be_asked_is_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"why takes a replay at least, and groups of rate, optimiser, clipping"):
        scalelong.why(Loop(), **options)


def test_a_loop_without_losses_is_one_line() -> None:
    with pytest.raises(ValueError, match="replay yielded no losses for unchanged, draw 0: yield that of every step"):
        scalelong.why(lambda trial, draw: [])


def model_and_optimizer() -> tuple[UViT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = UViT(img_size=8, patch_size=4, in_chans=1, embed_dim=16, depth=4, num_heads=2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0)


def step(model: UViT, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 1, 8, 8), torch.zeros(2)).square().mean().mul(1e3).backward()
    optimizer.step()


def test_rates_are_lower_only_while_the_optimiser_steps() -> None:
    moved = []
    for trial in (Trial(), BY_ID["lr-quarter"]):
        model, optimizer = model_and_optimizer()
        trial(model, optimizer)
        before = model.patch_embed.proj.weight.detach().clone()
        step(model, optimizer)
        moved.append((model.patch_embed.proj.weight.detach() - before).abs().max().item())
        assert optimizer.param_groups[0]["lr"] == 0.5
    assert moved[1] == pytest.approx(moved[0] / 4, rel=1e-4)


def test_settings_of_adam_are_changed_in_every_group() -> None:
    model, optimizer = model_and_optimizer()
    BY_ID["beta2"](model, optimizer)
    BY_ID["eps"](model, optimizer)
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.9, 0.95), 1e-6)}


def test_gradients_are_clipped_before_the_step() -> None:
    model, optimizer = model_and_optimizer()
    BY_ID["clip-norm"](model, optimizer)
    step(model, optimizer)
    norms = torch.stack([weight.grad.norm() for weight in model.parameters() if weight.grad is not None])
    assert norms.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_gates_of_scaled_skips_are_trained_too() -> None:
    model, optimizer = model_and_optimizer()
    BY_ID["ls"](model, optimizer)
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert hasattr(model, "skip_scaling") and all(id(weight) in trained for weight in model.parameters())
    step(model, optimizer)
