"""The seat belt in the trainer: what a caught run becomes, that resuming is exact, and where it is left off."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import SignalAt, assert_same_run, final_tensors, in_processes, lasting_metrics, make_trainer, run_tiny
from torch import Tensor, nn

from scalelong.compare.grid import make_plan
from scalelong.config import load_recipe
from scalelong.guard import TrainingDiverged, snapshots
from scalelong.runs import Run
from scalelong.training import Trainer

LONG = (
    "training.steps=150",
    "training.checkpoint_every=1000",
    "training.log_every=10",
    "optim.lr=1e-3",
    "optim.warmup_steps=200",
)
OFF = "training.seat_belt=false"


def collapse(trainer: Trainer, first: int = 100, last: int = 119) -> Trainer:
    """Let the network return far too much for some batches."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output + 3.0 if first <= trainer.state.step + trainer.state.batch_offset <= last else None

    trainer.network.register_forward_hook(hook)
    return trainer


def rollbacks(out: Path) -> list[dict[str, Any]]:
    return [line for line in lasting_metrics(out) if line.get("event") == "rollback"]


def without_belt(out: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in final_tensors(out).items() if not name.startswith("belt")}


def test_a_run_in_which_it_never_acts_has_the_weights_of_one_without_it_to_the_bit(tmp_path: Path) -> None:
    run_tiny(tmp_path / "on", *LONG)
    run_tiny(tmp_path / "off", *LONG, OFF)
    assert_same_run(tmp_path / "on", tmp_path / "off")


def test_a_collapse_takes_the_run_back_and_on_with_other_batches_at_a_lower_rate(tmp_path: Path) -> None:
    trainer = collapse(make_trainer(tmp_path, *LONG))
    assert trainer.train().finished
    (event,) = rollbacks(tmp_path)
    assert (event["from_step"], event["step"], event["factor"]) == (120, 40, 0.7)
    assert event["message"].startswith("step 120: the loss was ")
    assert trainer.state.batch_offset == 80
    rates = {line["step"]: line["lr"] for line in lasting_metrics(tmp_path) if "lr" in line}
    assert rates[40] == pytest.approx(1e-3 * 40 / 200, rel=1e-9)
    assert rates[150] == pytest.approx(0.7e-3 * 150 / 200, rel=1e-9)
    assert all(tensor.isfinite().all() for tensor in final_tensors(tmp_path).values())


@pytest.mark.parametrize(("step", "clip"), [(57, "null"), (119, "1.05")])
def test_a_run_killed_before_a_collapse_ends_as_one_that_never_was_to_the_bit(
    step: int, clip: str, tmp_path: Path
) -> None:
    settings = (*LONG, f"optim.adaptive_clip={clip}")
    collapse(make_trainer(tmp_path / "whole", *settings)).train()
    stopped = collapse(make_trainer(tmp_path / "stopped", *settings, display=SignalAt(step, signal.SIGTERM))).train()
    assert stopped.step == step
    collapse(make_trainer(tmp_path / "stopped", *settings)).train()
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    assert len(rollbacks(tmp_path / "stopped")) == 1


def test_the_averages_of_clipping_go_back_with_the_weights(tmp_path: Path) -> None:
    trainer = collapse(make_trainer(tmp_path, *LONG, "optim.adaptive_clip=1.05"))
    trainer.train()
    assert trainer.state.batch_offset == 80
    assert trainer.state.clip is not None and trainer.state.clip.steps == trainer.state.step == 150


def test_a_regular_checkpoint_holds_no_snapshots_and_resumes_exactly(tmp_path: Path) -> None:
    settings = (*LONG, "training.checkpoint_every=90")
    collapse(make_trainer(tmp_path / "whole", *settings)).train()
    trainer = collapse(make_trainer(tmp_path / "killed", *settings))
    with pytest.raises(KeyboardInterrupt):
        trainer.logger.display = _Killed(trainer, 97)
        trainer.train()
    checkpoint = Run(tmp_path / "killed").checkpoints().latest()
    assert checkpoint is not None and checkpoint.step == 90
    assert set(checkpoint.groups) == {"model", "ema", "optimizer"}
    collapse(make_trainer(tmp_path / "killed", *settings)).train()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert rollbacks(tmp_path / "whole")[0]["step"] == 90


class _Killed:
    """A display that ends the run without a checkpoint."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        self.inner, self.at = trainer.logger.display, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, step: int, loss: float) -> None:
        if step == self.at:
            raise KeyboardInterrupt


def test_a_run_that_collapses_again_and_again_ends_with_the_diagnosis(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match="after 3 returns to step 40, .*Lower the learning rate.*--resume"):
        collapse(make_trainer(tmp_path, *LONG), last=10**9).train()
    assert lasting_metrics(tmp_path)[-1]["event"] == "diverged"


@pytest.mark.parametrize("belt", [OFF, "training.seat_belt=true"])
def test_numbers_that_are_never_finite_end_the_run_at_once(belt: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, belt, "training.max_skipped=1")
    trainer.network.register_forward_hook(lambda module, args, output: output * float("nan"))
    with pytest.raises(TrainingDiverged, match="training diverged: at step 2 the numbers were still not finite"):
        trainer.train()


def test_no_memory_for_it_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "free_memory", lambda: 100.0)
    with pytest.raises(MemoryError, match="training.seat_belt=false"):
        run_tiny(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run_tiny(tmp_path / "run", OFF).finished


def test_a_branch_begins_with_a_belt_of_its_own(tmp_path: Path) -> None:
    collapse(make_trainer(tmp_path / "run", *LONG)).train()
    checkpoint = Run(tmp_path / "run").checkpoints().latest()
    assert checkpoint is not None
    run_tiny(tmp_path / "branch", *LONG, "training.steps=160", "optim.lr=5e-4", resume=checkpoint.path)
    assert lasting_metrics(tmp_path / "branch")[-1]["lr"] == pytest.approx(5e-4 * 160 / 200, rel=1e-9)


def test_comparisons_leave_it_off_unless_asked_and_recipes_have_it_on() -> None:
    assert load_recipe("digits").training.seat_belt
    (arm,) = make_plan("digits", ["none"]).arms
    assert not arm.config.training.seat_belt
    (arm,) = make_plan("digits", ["none"], overrides=["training.seat_belt=true"]).arms
    assert arm.config.training.seat_belt


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_go_back_together_also_after_a_kill(kind: str, tmp_path: Path) -> None:
    settings = [*LONG, f"training.parallel={kind}", "optim.lr=1.0", "optim.warmup_steps=60", "training.steps=80"]
    in_processes(
        {"out": tmp_path / "two", "processes": 2, "overrides": settings},
        {"out": tmp_path / "killed", "processes": 2, "overrides": settings, "kills": 1, "seed": 5},
    )
    assert rollbacks(tmp_path / "two")
    assert_same_run(tmp_path / "killed", tmp_path / "two")
    # 1e-5: sums in another order.
    assert torch.isfinite(next(iter(without_belt(tmp_path / "two").values()))).all()
