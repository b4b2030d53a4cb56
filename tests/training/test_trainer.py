"""The loop: what a step does, what it never does, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_cases import lasting_metrics, losses, make_trainer, run_tiny, tiny
from torch import Tensor, nn

from scalelong.config import build_model, build_process
from scalelong.guard.losses import TrainingDiverged
from scalelong.runs import CheckpointStore, Run, RunError, read_metrics
from scalelong.sampling.images import tile
from scalelong.training import Trainer, loop, samples
from scalelong.training.loss import Validation, find_origin
from scalelong.training.parallel import check_launcher
from scalelong.training.state import learning_rate
from scalelong.utils.runtime import Rank

MODULE = "in_blocks.0.mlp.fc1"


def poison(trainer: Trainer, when: Callable[[], bool], value: float = math.nan) -> None:
    """Let one module return a non-finite number whenever the condition holds."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output + value if when() else None

    trainer.network.get_submodule(MODULE).register_forward_hook(hook)


def snapshot(trainer: Trainer) -> list[Tensor]:
    """Weights, averages and moments."""
    state = trainer.state
    moments = [value for slots in state.optimizer.state.values() for value in slots.values()]
    return [tensor.detach().clone() for tensor in (*trainer.parameters, *state.ema.state_dict().values(), *moments)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_step_is_logged_with_its_module_and_leaves_everything_untouched(
    value: float, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    poison(trainer, lambda: trainer.state.step == 2, value)
    trainer.begin()
    for _ in range(2):
        trainer.advance()
    before = snapshot(trainer)
    trainer.advance()
    assert all(map(torch.equal, snapshot(trainer), before))
    (event,) = [line for line in lasting_metrics(tmp_path) if line.get("event") == "skipped"]
    assert event["step"] == 3
    assert event["origin"] == f"{MODULE} is the first module whose output was non-finite"
    trainer.advance()
    assert not all(map(torch.equal, snapshot(trainer), before))


def test_a_bad_step_of_micro_batches_is_diagnosed_with_one_of_them_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, "training.grad_accumulation=4")
    poison(trainer, lambda: trainer.state.step == 0)
    sizes: list[int] = []
    trainer.network.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    monkeypatch.setattr(loop, "find_origin", lambda *args: sizes.clear() or find_origin(*args))
    trainer.train_step()
    (event,) = [line for line in lasting_metrics(tmp_path) if line.get("event") == "skipped"]
    assert MODULE in event["origin"]
    # The first part, of two of the eight images, tells: the others are not computed again.
    assert sizes == [2]


def test_too_many_bad_steps_go_back_to_the_checkpoint_and_on_with_other_batches(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.max_skipped=1")
    poison(trainer, lambda: trainer.state.step + trainer.state.batch_offset in (4, 5))
    assert trainer.train().finished
    events = [(line["event"], line["step"]) for line in lasting_metrics(tmp_path) if "event" in line]
    assert events == [("skipped", 5), ("skipped", 6), ("rollback", 3)]
    # Batches 3, 4 and 5 were seen before; step 4 takes batch 6.
    assert trainer.state.batch_offset == 3
    assert [line["step"] for line in lasting_metrics(tmp_path) if "lr" in line] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]


def test_a_rollback_comes_back_to_the_weights_before_the_first_bad_step(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, "training.max_skipped=2", "training.checkpoint_every=1", "training.keep_last=1", "training.steps=9"
    )
    poison(trainer, lambda: trainer.state.step + trainer.state.batch_offset in (4, 5, 6))
    assert trainer.train().finished
    (event,) = [line for line in lasting_metrics(tmp_path) if line.get("event") == "rollback"]
    assert (event["from_step"], event["step"]) == (7, 4)


def test_a_checkpoint_that_fell_on_a_bad_step_is_written_after_the_next_good_one(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.keep_last=9")
    poison(trainer, lambda: trainer.state.step == 2)
    trainer.train()
    assert Run(tmp_path).checkpoints().steps() == [0, 4, 6, 8]


def test_a_run_that_stays_non_finite_ends_with_advice_and_finite_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.max_skipped=1", "training.steps=50")
    poison(trainer, lambda: trainer.state.step >= 2)
    with pytest.raises(TrainingDiverged, match="Lower the learning rate.*--resume CHECKPOINT --out OTHER"):
        trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.parameters)
    assert lasting_metrics(tmp_path)[-1]["event"] == "diverged"


@pytest.mark.parametrize("limit", [0.01, None])
def test_the_optimiser_gets_gradients_of_the_largest_norm_and_the_log_the_norm_before(
    limit: float | None, tmp_path: Path
) -> None:
    trainer, norms = make_trainer(tmp_path, f"optim.clip_norm={'null' if limit is None else limit}"), []

    def note(*_: Any) -> None:
        norms.append(torch.cat([weight.grad.flatten() for weight in trainer.parameters]).norm().item())

    trainer.state.optimizer.register_step_pre_hook(note)
    verdict = trainer.train_step()
    assert verdict.grad_norm > 0.1
    assert norms == pytest.approx([limit or verdict.grad_norm], rel=1e-3)


def test_accumulated_parts_have_the_losses_of_the_whole_batch(tmp_path: Path) -> None:
    run_tiny(tmp_path / "whole")
    run_tiny(tmp_path / "parts", "training.grad_accumulation=4")
    # 1e-5: sums in another order, over eight steps.
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_the_same_recipe_gives_the_same_log_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        run_tiny(tmp_path / name, f"seed={seed}", "training.validate_every=4")
    assert lasting_metrics(tmp_path / "same") == lasting_metrics(tmp_path / "one")
    assert losses(tmp_path / "other") != losses(tmp_path / "one")


def test_training_lowers_the_validation_loss_of_raw_and_ema_weights(tmp_path: Path) -> None:
    run_tiny(tmp_path, "training.steps=60", "training.validate_every=30", "optim.warmup_steps=5", "optim.lr=3e-3")
    first, last = [line for line in lasting_metrics(tmp_path) if "validation_loss" in line]
    assert last["validation_loss"] < first["validation_loss"] < 1.2
    assert last["validation_loss_ema"] < first["validation_loss_ema"] < 1.2


def test_the_best_checkpoint_by_validation_loss_is_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "training.validate_every=1", "training.checkpoint_every=1", "training.keep_last=1")
    values = iter([9.0, 9.0, 1.0, 1.0, *[5.0] * 12])
    trainer.validation.loss_sum = lambda model: torch.tensor(next(values) * len(trainer.validation))
    trainer.train()
    assert Run(tmp_path).checkpoints().steps() == [2, 8]


def test_the_validation_loss_does_not_depend_on_batches_or_processes(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    config, model = trainer.config, build_model(trainer.config)
    data, process = trainer.batches.data, build_process(config.diffusion)
    parts: Any = (data, process, trainer.conditioning)
    whole = Validation(*parts, seed=0, batch_size=len(data)).loss(model)
    shares = [Validation(*parts, seed=0, batch_size=100, rank=Rank(rank, 3)).loss(model) for rank in range(3)]
    # 1e-6: float32 sums in another order.
    assert sum(shares) == pytest.approx(whole, rel=1e-6)


def test_no_rate_counts_the_time_of_a_validation_loss_a_grid_or_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            now[0] += 1000
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(
        "scalelong.training.logger.time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    )
    for place, name in ((Validation, "loss_sum"), (samples, "sample_network"), (CheckpointStore, "save")):
        monkeypatch.setattr(place, name, slow(getattr(place, name)))
    run_tiny(tmp_path, "training.validate_every=2", "training.sample_every=2", "sampling.steps=1")
    assert now[0] > 10_000
    assert [line["seconds"] for line in read_metrics(tmp_path / "metrics.jsonl") if "lr" in line] == [0.0] * 8


def test_the_learning_rate_warms_up_and_stays(tmp_path: Path) -> None:
    run_tiny(tmp_path, "optim.warmup_steps=4", "optim.lr=0.004")
    rates = [line["lr"] for line in lasting_metrics(tmp_path)]
    assert rates == pytest.approx([0.001, 0.002, 0.003, *[0.004] * 5], rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_falling_learning_rate_starts_at_the_full_rate_and_would_be_0_after_the_last_step(schedule: str) -> None:
    config = tiny(f"optim.schedule={schedule}", "optim.warmup_steps=4", "optim.lr=0.004").optim
    rates = [learning_rate(config, step, 104) for step in range(105)]
    assert rates[:5] == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.004], rel=1e-12)
    assert rates[54] == pytest.approx(0.002) and rates[104] == 0
    assert all(earlier > later for earlier, later in pairwise(rates[4:]))
    # Half-way down to half-way up: the cosine falls slowly at both ends.
    assert rates[29] == pytest.approx(0.003 if schedule == "linear" else 0.002 * (1 + math.cos(math.pi / 4)))


def test_a_run_logs_the_falling_rate_and_does_not_resume_with_another_length(tmp_path: Path) -> None:
    falling = ("optim.schedule=linear", "optim.warmup_steps=0", "optim.lr=0.008")
    run_tiny(tmp_path, *falling)
    rates = [line["lr"] for line in lasting_metrics(tmp_path)]
    assert rates == pytest.approx([0.008, 0.007, 0.006, 0.005, 0.004, 0.003, 0.002, 0.001], rel=1e-12)
    with pytest.raises(RunError, match="training.steps 8 → 16"):
        run_tiny(tmp_path, *falling, "training.steps=16")


def test_training_leaves_the_global_random_state_as_it_was(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    run_tiny(tmp_path, "training.validate_every=4", "training.sample_every=8")
    assert torch.equal(torch.get_rng_state(), before)


def test_wrappers_that_only_accelerate_could_do_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    check_launcher()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="accelerate's own DEEPSPEED is not used: launch without it$"):
        check_launcher()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="set training.parallel=fsdp"):
        check_launcher()


def test_a_grid_holds_every_image_once_and_unchanged() -> None:
    images = torch.arange(7 * 3 * 4 * 4, dtype=torch.uint8).view(7, 3, 4, 4)
    sheet = tile(images, gap=2)
    assert sheet.shape == (3, 3 * 6 + 2, 3 * 6 + 2)
    found = [sheet[:, 2 + 6 * row : 6 + 6 * row, 2 + 6 * col : 6 + 6 * col] for row in range(3) for col in range(3)]
    assert torch.equal(torch.stack(found[:7]), images)
    assert all((rest == 255).all() for rest in found[7:])
