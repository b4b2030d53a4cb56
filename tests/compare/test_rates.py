"""Laws of the bands of curves and of the sensitivity to the learning rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong.compare import (
    Band,
    Curve,
    Estimate,
    confidence_band,
    largest_stable_rate,
    mean_interval,
    rate_sensitivity,
)

RATES = [1e-3, 2e-3, 4e-3, 8e-3]


def test_a_band_is_the_mean_and_its_interval_at_each_step() -> None:
    band = confidence_band([Curve((1, 2), (3.0, 2.0)), Curve((1, 2), (4.0, 2.5)), Curve((1, 2), (5.0, 1.0))])
    for k, values in enumerate(([3.0, 4.0, 5.0], [2.0, 2.5, 1.0])):
        found = mean_interval(values)
        assert (band.mean[k], band.low[k], band.high[k]) == (found.value, found.low, found.high)


def test_one_run_has_no_band_and_no_run_no_curve() -> None:
    assert confidence_band([Curve((1, 2), (3.0, 2.0))]) == Band((1, 2), (3.0, 2.0), (None, None), (None, None))
    assert confidence_band([]) == Band((), (), (), ())


def test_a_band_ends_where_the_first_run_does_or_diverges() -> None:
    whole = Curve((1, 2, 3), (3.0, 2.0, 1.0))
    for broken in (Curve((1, 2), (3.0, 2.0)), Curve((1, 2, 3), (3.0, 2.0, math.nan))):
        band = confidence_band([whole, whole, broken])
        assert band.steps == (1, 2, 3)
        assert band.mean == (3.0, 2.0, None) and band.high == (3.0, 2.0, None)


tables = st.integers(1, 4).flatmap(
    lambda seeds: st.lists(
        st.lists(st.one_of(st.floats(0.01, 5), st.just(math.inf), st.just(math.nan)), min_size=seeds, max_size=seeds),
        min_size=len(RATES),
        max_size=len(RATES),
    )
)


@given(tables)
def test_the_sensitivity_is_between_0_and_what_training_can_gain(losses: list[list[float]]) -> None:
    found = rate_sensitivity(RATES, losses, initial_loss=1.0)
    assert found.value is not None and 0 <= found.value < 1
    assert found.low is None or 0 <= found.low <= found.value


@given(tables, st.floats(1.5, 100))
def test_the_sensitivity_scales_with_the_loss(losses: list[list[float]], unit: float) -> None:
    scaled = [[unit * loss for loss in of_rate] for of_rate in losses]
    found, other = rate_sensitivity(RATES, losses, 1.0).value, rate_sensitivity(RATES, scaled, unit).value
    assert found is not None and other == pytest.approx(unit * found, abs=1e-9)


def test_a_method_that_is_as_good_with_every_rate_has_sensitivity_0() -> None:
    assert rate_sensitivity(RATES, [[0.2, 0.3]] * 4, 1.0) == Estimate(0.0, 0.0, 0.0)


def test_the_sensitivity_is_the_mean_excess_over_the_best_rate_with_an_interval_over_seeds() -> None:
    losses = [[0.5, 0.6], [0.2, 0.4], [0.3, 0.2], [math.inf, 0.6]]
    of_seeds = [(0.3 + 0.0 + 0.1 + 0.8) / 4, (0.4 + 0.2 + 0.0 + 0.4) / 4]
    found, expected = rate_sensitivity(RATES, losses, 1.0), mean_interval(of_seeds)
    assert found.value == pytest.approx(expected.value)
    assert found.high == pytest.approx(expected.high)
    assert found.low == 0.0, "the interval of two seeds would reach below 0, where no sensitivity is"


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.5, 0.4, 0.3, 0.2], 8e-3),
        ([0.5, 0.2, 0.25, 0.3], 4e-3),
        ([0.2, 0.3, 0.2, 0.2], 1e-3),
        ([0.5, 0.2, math.inf, 0.2], 2e-3),
        ([0.5, math.nan, 0.2, 0.9], 4e-3),
        ([math.inf, math.nan, math.inf, math.inf], None),
        ([1.0, 1.2, 1.1, 1.0], None),
    ],
)
def test_the_largest_stable_rate_is_the_last_one_near_the_best_going_up_from_it(losses, expected) -> None:
    assert largest_stable_rate(RATES, [[loss] for loss in losses], initial_loss=1.0) == expected


def test_a_rate_is_not_stable_if_one_of_its_runs_diverged() -> None:
    losses = [[0.5, 0.5], [0.2, 0.2], [0.2, math.inf], [0.2, 0.2]]
    assert largest_stable_rate(RATES, losses, initial_loss=1.0) == 2e-3


def test_the_order_of_the_rates_does_not_matter() -> None:
    losses = [[0.5], [0.2], [0.25], [0.9]]
    assert largest_stable_rate(RATES[::-1], losses[::-1], 1.0) == largest_stable_rate(RATES, losses, 1.0) == 4e-3


@pytest.mark.parametrize("losses", [[[1.0]] * 3, [[1.0]] * 3 + [[1.0, 2.0]], [[]] * 4])
def test_a_table_with_holes_is_refused(losses: list[list[float]]) -> None:
    for function in (rate_sensitivity, largest_stable_rate):
        with pytest.raises(ValueError, match="a loss for every seed: there are 4 rates"):
            function(RATES, losses, 1.0)
