"""Non-finite steps are skipped, counted and rolled back; losses that jump are marked."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from scalelong.guard.losses import LossWatch, SpikeDetector, TrainingDiverged, check_finite

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("loss", [0.5, NAN, INF, -INF])
@pytest.mark.parametrize("norm", [2.0, NAN, INF])
def test_a_step_is_ok_exactly_when_both_numbers_are_finite(loss: float, norm: float) -> None:
    decision = check_finite(loss, norm, max_skipped=1)
    assert decision.ok == (math.isfinite(loss) and math.isfinite(norm))
    assert decision.action == ("ok" if decision.ok else "skip")
    assert decision.is_nonfinite == (not decision.ok)
    assert (repr(decision.loss), repr(decision.grad_norm)) == (repr(loss), repr(norm))


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_after_so_many_skips_in_a_row_the_next_asks_for_a_rollback(allowed: int) -> None:
    actions = [check_finite(NAN, 1.0, skipped=skipped, max_skipped=allowed).action for skipped in range(allowed + 1)]
    assert actions == ["skip"] * allowed + ["rollback"]


@pytest.mark.parametrize(
    ("loss", "scale", "action"), [(0.5, 2.0, "overflow"), (0.5, 1.0, "skip"), (NAN, 2.0, "skip"), (0.5, 0.5, "skip")]
)
def test_an_overflow_is_a_finite_loss_whose_scaled_gradients_are_not(loss: float, scale: float, action: str) -> None:
    assert check_finite(loss, INF, max_skipped=5, scale=scale).action == action


def test_decisions_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        check_finite(1.0, 1.0).loss = 0.0  # type: ignore


def test_a_run_that_ends_says_what_happened_and_what_to_change_in_one_line() -> None:
    said = str(TrainingDiverged("after 3 returns to step 40 the loss was 1.01"))
    assert said.startswith("training diverged: after 3 returns to step 40 the loss was 1.01. Lower the learning rate")
    assert "scaling.method=cs" in said and "\n" not in said


def test_weights_never_see_a_bad_gradient() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(30):
        x = torch.randn(8, 4)
        if step % 3 == 1:
            x[0, 0] = [NAN, INF][step % 2]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        decision = check_finite(loss.item(), norm.item(), max_skipped=100)
        if decision.ok:
            optimizer.step()
        assert decision.ok == (step % 3 != 1)
        changed = not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert changed == decision.ok
    assert all(parameter.isfinite().all() for parameter in model.parameters())


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


def noisy(level: Callable[[int], float], steps: int, noise: float, seed: int) -> list[list[float]]:
    """Windows of 20 losses around a level, each off by a share of it that has a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    normal, chi = torch.randn(steps, generator=generator), torch.randn(steps, 4, generator=generator).square().mean(1)
    losses = [
        level(step) * math.exp(noise * (n / c.sqrt()).item())
        for step, (n, c) in enumerate(zip(normal, chi, strict=True))
    ]
    return [losses[k : k + 20] for k in range(0, steps, 20)]


HEALTHY = {
    "learning fast, small batches": (lambda step: 0.16 + 0.84 * math.exp(-step / 80), 0.3),
    "learning slowly, large batches": (lambda step: 0.1 + 0.9 * math.exp(-step / 2000), 0.02),
    "long at that of predicting nothing": (lambda step: min(1.0, math.exp(-(step - 1500) / 300) + 0.2), 0.05),
    "large at first": (lambda step: 0.2 + 1e4 * math.exp(-step / 50), 0.2),
    "hard to learn": (lambda step: 0.9 + 0.1 * math.exp(-step / 500), 0.05),
    "a spike of five steps every thousand": (lambda step: 0.8 if step % 1000 < 5 else 0.2, 0.1),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_runs_that_survive_are_taken_for_collapsed_at_most_once_in_ten_thousand_steps(name: str) -> None:
    level, noise = HEALTHY[name]
    alarms = 0
    for seed in range(10):
        watch = LossWatch(nothing=1.0)
        alarms += [watch.look(window) for window in noisy(level, 4000, noise, seed)].count("collapsed")
    assert alarms <= 4  # In 40,000 steps.


@pytest.mark.parametrize("best", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("end", [1.0, 3.0, 50.0])
def test_a_collapse_is_seen_within_two_windows(best: float, end: float) -> None:
    for seed in range(10):
        watch, start = LossWatch(nothing=1.0), 3000 + 7 * seed
        windows = noisy(lambda step: best if step < start else end, 3200, 0.05, seed)  # noqa: B023
        found = [watch.look(window) for window in windows].index("collapsed")
        assert 20 * found - start < 20


def test_a_loss_that_was_once_a_little_better_and_stays_at_nothing_is_believed_after_ten_windows() -> None:
    watch = LossWatch(nothing=1.0)
    states = [watch.look(window) for window in noisy(lambda step: 0.96 if step < 40 else 1.001, 400, 0.005, 0)]
    assert states[:2] == ["healthy", "healthy"]
    assert "collapsed" in states


def test_a_window_that_is_not_finite_has_collapsed_whenever_it_comes() -> None:
    assert LossWatch().look([NAN] * 20) == "collapsed"
    watch = LossWatch(nothing=1.0)
    watch.look([0.2] * 20)
    assert watch.look([0.2] * 19 + [INF]) == "collapsed"
    assert watch.look([0.2] * 20) == "healthy"


def test_the_watch_goes_on_from_its_state() -> None:
    windows = noisy(lambda step: 0.2 if step < 700 else 1.0, 800, 0.1, 0)
    whole, begun, resumed = LossWatch(), LossWatch(), LossWatch()
    expected = [whole.look(window) for window in windows]
    first = [begun.look(window) for window in windows[:20]]
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert first + [resumed.look(window) for window in windows[20:]] == expected
