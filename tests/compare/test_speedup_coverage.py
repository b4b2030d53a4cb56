"""The interval of a speed-up covers the true one as often as it says: counted on runs whose speed-up is known."""

from __future__ import annotations

import math

import pytest
import torch
from synthetic_runs import NOISES, NOISY, WAVY, Rates, Setting, draw_runs, measure_rates

from scalelong.compare import Curve, speedup
from scalelong.compare.intervals import bootstrap_interval
from scalelong.compare.speedup import log_speedup

SPEEDUPS = (0.7, 1.0, 1.5, 2.5)


def check(rates: Rates, truth: float) -> None:
    """95 % ± 3 points over 1000 repetitions, and "faster" said of what is not faster in at most 5 % of them."""
    assert 0.92 <= rates.covered <= 0.98, rates
    assert truth > 1 or rates.faster <= 0.05, rates
    assert truth < 1 or rates.slower <= 0.05, rates


@pytest.mark.parametrize("truth", (0.7, 2.5))
def test_the_interval_of_five_seeds_covers_the_true_speedup_at_its_stated_rate(truth: float) -> None:
    check(measure_rates(Setting(truth, seeds=5, **NOISY)), truth)


@pytest.mark.parametrize("seeds", [3, 8])
def test_without_an_effect_faster_is_said_in_at_most_five_percent_of_cases(seeds: int) -> None:
    check(measure_rates(Setting(1.0, seeds, **WAVY)), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("truth", SPEEDUPS)
@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_the_interval_covers_for_every_noise_truth_and_number_of_seeds(noise: str, truth: float, seeds: int) -> None:
    check(measure_rates(Setting(truth, seeds, **NOISES[noise]), seed=1), truth)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("truth", SPEEDUPS)
def test_noise_makes_no_speedup_larger_and_on_average_at_most_five_percent_smaller(noise: str, truth: float) -> None:
    steps, baseline, method = draw_runs(Setting(truth, 5, **NOISES[noise]), 4000, torch.Generator().manual_seed(2))
    found = log_speedup(steps, baseline, steps, method)
    towards_one = (math.log(truth) - found.mean().item()) * (1 if truth >= 1 else -1)
    error = found.std().item() / math.sqrt(found.numel())
    assert -3 * error <= towards_one <= 0.05


def test_the_first_step_below_the_final_loss_of_the_baseline_would_be_early_by_luck() -> None:
    """Why the time above the level is counted: by its first crossing, the same method would be 1.1 times as fast."""
    steps, baseline, method = draw_runs(Setting(1.0, 5, **WAVY), 1000, torch.Generator().manual_seed(2))
    below = method <= baseline[..., -1:]
    first = torch.where(below.any(-1), steps[below.int().argmax(-1)], steps[-1])
    assert torch.log(steps[-1] / first).mean().exp() > 1.1
    assert log_speedup(steps, baseline, steps, method).mean().exp().item() == pytest.approx(1, abs=0.01)


def test_the_counted_intervals_are_those_of_the_speedup_of_curves() -> None:
    steps, baseline, method = draw_runs(Setting(1.5, 4, **WAVY), 1, torch.Generator().manual_seed(3))
    low, high = bootstrap_interval(log_speedup(steps, baseline, steps, method))
    whole = tuple(map(int, steps))
    found = speedup(*([Curve(whole, tuple(run.tolist())) for run in runs[0]] for runs in (baseline, method)))
    assert (found.low, found.high) == pytest.approx((math.exp(low.item()), math.exp(high.item())), rel=1e-12)
