"""Laws of the intervals of means, differences and shares."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scalelong.compare import Difference, Estimate, mean_interval, paired_difference, proportion_interval
from scalelong.compare.intervals import bootstrap_interval, student_quantile

numbers = st.lists(st.integers(-10_000, 10_000).map(lambda x: x / 100), min_size=2, max_size=10)


@given(numbers)
def test_the_interval_of_a_mean_is_students(values: list[float]) -> None:
    found = mean_interval(values)
    assert found.value == pytest.approx(fmean(values))
    if len(set(values)) > 1:
        expected = stats.t.interval(0.95, len(values) - 1, loc=fmean(values), scale=stats.sem(values))
        assert (found.low, found.high) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_one_value_has_no_interval_and_none_or_a_broken_one_no_mean() -> None:
    assert mean_interval([2.0]) == Estimate(2.0, None, None)
    assert mean_interval([]) == mean_interval([1.0, math.nan]) == mean_interval([1.0, math.inf]) == Estimate(None)


def test_equal_values_have_an_interval_without_width() -> None:
    assert mean_interval([0.1] * 3) == Estimate(0.1, 0.1, 0.1)


def test_a_paired_difference_has_the_p_of_scipys_paired_t_test() -> None:
    first, second = [1.0, 2.5, 3.0, 4.2], [0.9, 1.9, 3.3, 3.1]
    found, expected = paired_difference(first, second), stats.ttest_rel(first, second)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()), rel=1e-9)


@given(numbers)
def test_the_p_of_a_difference_is_below_5_percent_exactly_if_its_interval_is_without_0(values: list[float]) -> None:
    found = paired_difference(values, [0.0] * len(values))
    assert found.low is not None and found.high is not None and found.p is not None
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


def sign_flip_p(differences: list[float]) -> float:
    """The exact p of the permutation test: how often random signs give a mean as far from 0."""
    observed = abs(fmean(differences)) - 1e-12
    flipped = [abs(fmean(s * d for s, d in zip(signs, differences, strict=True))) for signs in signs_of(differences)]
    return fmean(mean >= observed for mean in flipped)


def signs_of(differences: list[float]) -> product[tuple[int, ...]]:
    return product((1, -1), repeat=len(differences))


def test_the_p_of_the_paired_t_test_is_near_that_of_all_sign_flips() -> None:
    generator = torch.Generator().manual_seed(0)
    for shift in (0.0, 0.3, 0.8):
        values = (torch.randn(12, generator=generator, dtype=torch.float64) + shift).tolist()
        assert paired_difference(values, [0.0] * 12).p == pytest.approx(sign_flip_p(values), abs=0.02)


def test_sign_flips_of_five_pairs_could_never_show_a_difference() -> None:
    """Why the p that is reported is Student's."""
    differences = [1.0, 1.1, 0.9, 1.2, 1.0]
    assert sign_flip_p(differences) == 2 / 2**5 > 0.05
    p = paired_difference(differences, [0.0] * 5).p
    assert p is not None and p < 1e-4


def test_differences_that_are_all_the_same_are_certain_and_those_of_one_pair_are_not() -> None:
    assert paired_difference([2.0, 3.0], [1.0, 2.0]).p == 0.0
    assert paired_difference([2.0, 3.0], [2.0, 3.0]).p == 1.0
    assert paired_difference([2.0], [1.0]) == Difference(1.0)
    assert paired_difference([2.0, math.inf], [1.0, 1.0]) == Difference(None)
    with pytest.raises(ValueError, match="as many first values as second ones, not 2 and 1"):
        paired_difference([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("count", "of"), [(0, 1), (0, 5), (1, 5), (3, 8), (8, 8), (40, 100)])
def test_the_interval_of_a_share_is_wilsons(count: int, of: int) -> None:
    expected = stats.binomtest(count, of).proportion_ci(method="wilson")
    assert proportion_interval(count, of) == pytest.approx(tuple(expected), abs=1e-9)


def test_of_no_runs_nothing_is_known_and_an_impossible_share_is_refused() -> None:
    assert proportion_interval(0, 0) == (0.0, 1.0)
    for count, of in ((-1, 3), (4, 3)):
        with pytest.raises(ValueError, match=f"not {count} of {of}"):
            proportion_interval(count, of)


@given(numbers)
@settings(max_examples=40)
def test_the_bootstrap_interval_of_mirrored_values_is_the_mirrored_interval(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    low, high = bootstrap_interval(-x)
    torch.testing.assert_close((-high, -low), bootstrap_interval(x), rtol=1e-9, atol=1e-9)


def test_the_bootstrap_interval_moves_and_stretches_with_the_values() -> None:
    x = torch.tensor([0.1, 0.5, 0.2, 1.4], dtype=torch.float64)
    expected = torch.stack(bootstrap_interval(x)) * 3 + 7
    torch.testing.assert_close(torch.stack(bootstrap_interval(3 * x + 7)), expected, rtol=1e-9, atol=1e-9)


def test_the_bootstrap_interval_of_many_rows_is_that_of_each() -> None:
    x = torch.randn(10, 13, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap_interval(x)
    assert torch.equal(low[7, 3], bootstrap_interval(x[7, 3])[0])
    assert torch.equal(high[9, 12], bootstrap_interval(x[9, 12])[1])


def coverage(low: torch.Tensor, high: torch.Tensor) -> float:
    return ((low <= 0) & (high >= 0)).double().mean().item()


@pytest.mark.parametrize(("count", "of_percentiles"), [(3, 0.75), (5, 0.84)])
def test_the_bootstrap_interval_covers_where_plain_percentiles_do_not(count: int, of_percentiles: float) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(1000, count, generator=generator, dtype=torch.float64)
    assert 0.935 <= coverage(*bootstrap_interval(x)) <= 0.97
    drawn = x[:, torch.randint(count, (1000, count), generator=generator)].mean(-1)
    ends = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    assert coverage(*ends) == pytest.approx(of_percentiles, abs=0.03)


def test_of_skewed_values_the_bootstrap_interval_covers_more_often_than_students() -> None:
    draws = torch.rand(1000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = -draws.log() - 1
    half = student_quantile(0.95, 7) * x.std(1) / math.sqrt(8)
    assert coverage(*bootstrap_interval(x)) > coverage(x.mean(1) - half, x.mean(1) + half) + 0.01
