"""Non-finite steps are skipped, counted and rolled back; losses that jump are marked."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import pytest
import torch
from torch import Tensor, nn

from scalelong.guard.nonfinite import Guard, Origin, SpikeDetector, StepDecision, TrainingDiverged
from scalelong.models import UViT

NAN, INF = float("nan"), float("inf")


def bad(guard: Guard, times: int = 1) -> list[str]:
    return [guard.check(torch.tensor(NAN), torch.tensor(1.0)).action for _ in range(times)]


def good(guard: Guard) -> str:
    return guard.check(torch.tensor(1.0), torch.tensor(1.0)).action


@pytest.mark.parametrize("loss", [0.5, NAN, INF, -INF])
@pytest.mark.parametrize("norm", [2.0, NAN, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_step_is_ok_exactly_when_both_numbers_are_finite(loss: float, norm: float, dtype: torch.dtype) -> None:
    verdict = Guard(nn.Identity()).check(torch.tensor(loss, dtype=dtype), torch.tensor(norm, dtype=dtype), step=7)
    assert verdict.ok == (math.isfinite(loss) and math.isfinite(norm))
    assert verdict.action == ("ok" if verdict.ok else "skip")
    torch.testing.assert_close((verdict.loss, verdict.grad_norm), (loss, norm), rtol=0, atol=0, equal_nan=True)
    assert (verdict.event is None) == verdict.ok
    assert verdict.ok or verdict.event.step == 7  # type: ignore[union-attr]


def test_plain_numbers_and_losses_with_a_gradient_are_taken_too() -> None:
    guard = Guard(nn.Identity())
    assert guard.check(0.5, 2.0) == StepDecision("ok", 0.5, 2.0)
    assert guard.check(torch.ones(1, requires_grad=True), 2.0) == StepDecision("ok", 1.0, 2.0)


def test_a_good_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, norm = torch.tensor(1.0), torch.tensor(2.0)
    guard, reads = Guard(nn.Identity()), []
    for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
        real = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda *a, real=real, name=name: reads.append(name) or real(*a))
    assert guard.check(loss, norm).ok
    assert reads == ["tolist"]


def test_processes_decide_alike_when_the_numbers_are_averaged() -> None:
    ours, theirs = torch.tensor([1.0, 2.0]), torch.tensor([NAN, 2.0])
    guard = Guard(nn.Identity(), average=lambda pair: (ours + theirs) / 2)
    assert [guard.check(*pair).action for pair in (ours, theirs)] == ["skip", "skip"]
    assert Guard(nn.Identity(), average=lambda pair: (pair + 3) / 2).check(1.0, 2.0) == StepDecision("ok", 2.0, 2.5)


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_after_so_many_skips_in_a_row_the_next_asks_for_a_rollback(allowed: int) -> None:
    guard = Guard(nn.Identity(), max_skipped=allowed)
    assert bad(guard, allowed + 1) == ["skip"] * allowed + ["rollback"]
    assert bad(guard, allowed + 1) == ["skip"] * allowed + ["rollback"], "counting starts anew after a rollback"


def test_a_good_step_in_between_starts_the_count_anew() -> None:
    guard = Guard(nn.Identity(), max_skipped=2)
    for _ in range(5):
        assert [*bad(guard, 2), good(guard)] == ["skip", "skip", "ok"]


def test_after_so_many_rollbacks_training_has_diverged_and_the_error_gives_advice() -> None:
    guard = Guard(nn.Identity(), max_skipped=1, max_rollbacks=2)
    assert bad(guard, 4) == ["skip", "rollback"] * 2
    bad(guard)
    with pytest.raises(
        TrainingDiverged, match=r"after 2 rollbacks .*step 9: loss nan.* Lower the learning rate"
    ) as caught:
        guard.check(NAN, 1.0, step=9)
    assert "scaling.method=cs" in str(caught.value) and "\n" not in str(caught.value)


def test_events_count_and_are_frozen() -> None:
    guard = Guard(nn.Identity(), max_skipped=1)
    events = [guard.check(NAN, INF, step=step).event for step in (4, 5, 6)]
    assert [(e.step, e.consecutive, e.rollbacks) for e in events if e] == [(4, 1, 0), (5, 2, 1), (6, 1, 1)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        events[0].step = 0  # type: ignore


def test_a_resumed_guard_decides_as_one_never_stopped() -> None:
    guard = Guard(nn.Identity(), max_skipped=2, max_rollbacks=1)
    bad(guard, 5)
    resumed = Guard(nn.Identity(), max_skipped=2, max_rollbacks=1)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for each in (guard, resumed):
        with pytest.raises(TrainingDiverged):
            bad(each)


def test_a_bad_step_names_the_module_of_a_uvit_and_a_good_one_runs_nothing() -> None:
    model = UViT(8, embed_dim=16, depth=4, num_heads=2)
    x, t = torch.randn(2, 3, 8, 8), torch.zeros(2)
    runs = itertools.count()

    def run_forward() -> Tensor:
        next(runs)
        return model(x, t).square().mean()

    guard = Guard(model)
    assert guard.check(run_forward(), 1.0, forwards=[run_forward]).ok
    model.out_blocks[0].attn.proj.register_forward_hook(lambda module, args, output: output / 0)
    event = guard.check(run_forward(), 1.0, step=3, forwards=[run_forward]).event
    assert event is not None and event.origin == Origin("output", "out_blocks.0.attn.proj")
    assert str(event) == (
        "step 3: loss nan, gradient norm 1: out_blocks.0.attn.proj is the first module whose output was non-finite"
    )
    assert next(runs) == 3


@pytest.mark.parametrize("repeats", [True, False], ids=["finite when repeated", "not repeated"])
def test_an_event_without_a_known_origin_says_so(repeats: bool) -> None:
    model = nn.Linear(2, 2)
    forwards = [lambda: model(torch.ones(2)).sum()] if repeats else []
    event = Guard(model).check(NAN, 1.0, forwards=forwards).event
    assert event is not None and event.origin is None
    assert str(event) == "step 0: loss nan, gradient norm 1: where it began could not be found"


def test_weights_never_see_a_bad_gradient() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = Guard(model, max_skipped=100)
    for step in range(30):
        x = torch.randn(8, 4)
        if step % 3 == 1:
            x[0, 0] = [NAN, INF][step % 2]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        verdict = guard.check(loss, norm, step=step)
        if verdict.ok:
            optimizer.step()
        assert verdict.ok == (step % 3 != 1)
        changed = not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert changed == verdict.ok
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="counts must not be negative, got max_skipped=-1"):
        Guard(nn.Identity(), max_skipped=-1)


def noisy_losses(count: int, sigma: float, seed: int) -> list[float]:
    """A loss that falls from 1 to 0.1 under log-normal noise."""
    noise = random.Random(seed)
    return [(0.1 + 0.9 * math.exp(-step / 300)) * math.exp(noise.gauss(0, sigma)) for step in range(count)]


@pytest.mark.parametrize("sigma", [0.0, 0.03, 0.1, 0.3])
def test_log_normal_noise_around_a_falling_loss_is_hardly_ever_marked(sigma: float) -> None:
    detector = SpikeDetector()
    marked = [detector.update(step, loss) for step, loss in enumerate(noisy_losses(10_000, sigma, seed=1))]
    # Six deviations are one in 10⁹; that their size is estimated from 50 to 100 losses makes it one in some 10⁵.
    assert sum(spike is not None for spike in marked) <= 1


@pytest.mark.parametrize("sigma", [0.03, 0.1, 0.2])
def test_a_true_spike_is_marked_at_its_step_and_nowhere_else(sigma: float) -> None:
    for seed in range(20):
        losses = noisy_losses(1000, sigma, seed)
        losses[700] *= 8
        detector = SpikeDetector()
        spikes = [spike for step, loss in enumerate(losses) if (spike := detector.update(step, loss))]
        assert [spike.step for spike in spikes] == [700]
        assert spikes[0].loss == losses[700] and spikes[0].deviations > 6
        assert 0.1 < spikes[0].typical < 0.3


def test_earlier_spikes_do_not_hide_later_ones() -> None:
    losses = noisy_losses(1000, 0.1, seed=2)
    steps = [500, 510, 520, 530, 540, 550, 560]
    for step in steps:
        losses[step] *= 20
    detector = SpikeDetector()
    assert [step for step, loss in enumerate(losses) if detector.update(step, loss)] == steps


def test_a_jump_to_a_plateau_is_marked_while_it_is_news() -> None:
    detector = SpikeDetector(window=20)
    losses = [1.0] * 40 + [10.0] * 60
    marked = [step for step, loss in enumerate(losses) if detector.update(step, loss)]
    assert marked == list(range(40, 50))


def test_a_drop_is_no_spike() -> None:
    detector = SpikeDetector(window=20)
    assert not [step for step, loss in enumerate([1.0] * 40 + [0.01] * 5) if detector.update(step, loss)]


def test_it_does_not_judge_before_it_has_seen_half_a_window() -> None:
    detector = SpikeDetector(window=20)
    assert [detector.update(step, 10.0**step) for step in range(10)] == [None] * 10


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_losses_that_are_not_finite_are_neither_judged_nor_remembered(loss: float) -> None:
    detector = SpikeDetector(window=10)
    for step in range(10):
        detector.update(step, 1.0)
    before = detector.state_dict()
    assert detector.update(10, loss) is None
    assert detector.state_dict() == before


def test_a_loss_of_zero_is_taken() -> None:
    detector = SpikeDetector(window=10)
    assert [detector.update(step, 0.0) for step in range(10)] == [None] * 10
    assert detector.update(10, 1.0) is not None


def test_a_resumed_detector_marks_the_same_steps() -> None:
    losses = noisy_losses(400, 0.2, seed=3)
    losses[250] *= 10
    detector, resumed = SpikeDetector(), SpikeDetector()
    first = [detector.update(step, loss) for step, loss in enumerate(losses[:200])]
    resumed.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    rest = [[each.update(step, loss) for step, loss in enumerate(losses[200:])] for each in (detector, resumed)]
    assert len(first) == 200 and rest[0] == rest[1] and any(rest[0])


@pytest.mark.parametrize(("window", "threshold"), [(3, 6.0), (100, 0.0)])
def test_bad_options_are_refused(window: int, threshold: float) -> None:
    with pytest.raises(ValueError, match="a window of at least 4 and a threshold above 0 are needed"):
        SpikeDetector(window, threshold)
