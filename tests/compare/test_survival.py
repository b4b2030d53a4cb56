"""Laws of survival and of edges, and how often their intervals cover what is true."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic_edges import Setting, measure_rates, search

from scalelong.compare import rate_sensitivity
from scalelong.compare.edges import advice, describe_edge
from scalelong.compare.survival import RateTable, compare_survival, edge_ratio, next_rates

RATES = (0.001, 0.002, 0.004, 0.008)
SEEDS = 4


def table(*counts: int, rates: tuple[float, ...] = RATES, seeds: int = SEEDS) -> RateTable:
    """So many of the seeds survive each rate: the first ones."""
    survived = tuple(tuple(seed < count for seed in range(seeds)) for count in counts)
    losses = tuple(
        tuple(0.1 / (1 + 100 * rate) if ok else 1.0 for ok in row) for rate, row in zip(rates, survived, strict=True)
    )
    return RateTable(tuple(range(seeds)), rates, survived, losses)


@pytest.mark.parametrize(
    ("method", "baseline", "of", "p", "verdict"),
    [
        (4, 0, 4, 2 / 70, "survives more"),
        (0, 4, 4, 2 / 70, "survives less"),
        (5, 0, 5, 2 / 252, "survives more"),
        (4, 1, 4, 10 / 70, None),
        (3, 0, 3, 0.1, None),
        (6, 0, 6, 2 / 64, "survives more"),
        (8, 3, 8, 2 / 32, None),
        (8, 8, 8, 1.0, None),
        (0, 0, 8, 1.0, None),
    ],
)
def test_survival_is_compared_by_exact_tests_paired_from_six_seeds(
    method: int, baseline: int, of: int, p: float, verdict: str | None
) -> None:
    found = compare_survival([k < method for k in range(of)], [k < baseline for k in range(of)])
    assert (found.p, found.verdict) == (pytest.approx(p), verdict)
    assert found.test == ("Fisher's exact test" if of < 6 else "sign test of pairs")


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=10))
def test_swapping_the_methods_turns_the_verdict_round(pairs: list[tuple[bool, bool]]) -> None:
    one, other = (compare_survival([p[k] for p in pairs], [p[1 - k] for p in pairs]) for k in (0, 1))
    turned = {"survives more": "survives less", "survives less": "survives more", None: None}
    assert other.p == pytest.approx(one.p) and other.verdict == turned[one.verdict]


def test_the_edge_is_where_half_of_the_seeds_survive() -> None:
    found = table(4, 3, 1, 0)
    assert found.thresholds() == pytest.approx([math.log(0.002) + math.log(2) * k / 2 for k in (3, 1, 1, -1)])
    assert found.edge.value == pytest.approx(0.002 * math.sqrt(2))
    assert found.edge.low is not None and found.edge.low < found.edge.value < (found.edge.high or 0)
    assert (found.safe_rate, found.bound) == (0.001, None)


def test_another_unit_of_the_rate_multiplies_the_edge_and_leaves_the_ratio() -> None:
    base, method = table(4, 2, 1, 0), table(4, 4, 3, 0)
    ten = tuple(10 * rate for rate in RATES)
    scaled_base, scaled = table(4, 2, 1, 0, rates=ten), table(4, 4, 3, 0, rates=ten)
    assert scaled.edge.value == pytest.approx(10 * (method.edge.value or 0))
    assert edge_ratio(scaled, scaled_base).value == pytest.approx(edge_ratio(method, base).value)
    assert edge_ratio(base, method).value == pytest.approx(1 / (edge_ratio(method, base).value or 0))


def test_seeds_that_all_fail_between_the_same_rates_leave_the_interval_between_them() -> None:
    found = table(4, 4, 0, 0).edge
    assert (found.low, found.high) == pytest.approx((0.002, 0.004))
    near = edge_ratio(table(4, 4, 4, 0), table(4, 4, 0, 0))
    assert (near.value, near.low, near.high) == pytest.approx((2.0, 1.0, 4.0)) and near.verdict == "no difference shown"
    assert edge_ratio(table(4, 4, 4, 0), table(4, 0, 0, 0)).verdict == "larger"
    assert edge_ratio(table(4, 0, 0, 0), table(4, 4, 4, 0)).verdict == "smaller"


def test_an_edge_beyond_the_rates_is_bounded_or_not_told() -> None:
    assert (table(4, 4, 4, 3).edge.value, table(4, 4, 4, 3).edge.bound) == (None, "at least")
    assert (table(1, 1, 0, 0).edge.value, table(1, 1, 0, 0).safe_rate) == (None, None)
    assert table(4, 4, 4, 1).edge.bound == "at least" and table(4, 4, 4, 1).edge.value is not None
    assert edge_ratio(table(4, 4, 4, 1), table(4, 4, 0, 0)).bound == "at least"
    assert edge_ratio(table(4, 4, 0, 0), table(4, 4, 4, 1)).bound == "at most"
    assert edge_ratio(table(4, 4, 4, 3), table(4, 4, 0, 0)).verdict == "cannot be told"


def test_runs_that_fail_for_lack_of_steps_at_low_rates_are_not_beyond_the_edge() -> None:
    assert table(0, 4, 4, 0).edge == table(4, 4, 4, 0).edge
    assert table(1, 4, 3, 0).safe_rate == 0.002
    assert next_rates(RATES, [0, 4, 4, 0], 4, RATES) == [0.00566], "going down would not help"


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ([4, 4, 4, 4], [0.016]),
        ([0, 0, 0, 0], [0.0005]),
        ([3, 1, 0, 0], [0.0005, 0.00141, 0.00283]),
        ([4, 4, 0, 0], [0.00283]),
        ([4, 2, 2, 0], [0.00141, 0.00566]),
    ],
)
def test_the_search_goes_where_survival_changes_and_beyond_the_ends(counts: list[int], wanted: list[float]) -> None:
    assert next_rates(RATES, counts, 4, RATES) == wanted


def test_a_search_ends_close_to_the_edge_and_never_runs_away() -> None:
    generator, quiet = torch.Generator().manual_seed(0), Setting(spread=0.0, noise=0.0)
    found = search(torch.full((4,), math.log2(0.005), dtype=torch.float64), quiet, generator)
    assert found.edge.low is not None and found.edge.low <= 0.005 <= (found.edge.high or 0) <= 1.15 * found.edge.low
    for nowhere in (1e-9, 1e9):
        lost = search(torch.full((4,), math.log2(nowhere), dtype=torch.float64), quiet, generator)
        assert lost.edge.value is None and lost.rates[0] >= 0.001 / 16 and lost.rates[-1] <= 0.016 * 16


@pytest.mark.parametrize(("setting", "repetitions"), [(Setting(1.0), 300), (Setting(2.0), 150)])
def test_intervals_cover_at_their_stated_rate_and_larger_is_rarely_said_of_what_is_not(
    setting: Setting, repetitions: int
) -> None:
    found = measure_rates(setting, repetitions, seed=2)
    assert 0.92 <= found.edge <= 0.98 and 0.92 <= found.ratio <= 0.985, found
    assert found.larger <= 0.05 if setting.ratio == 1 else found.larger > 0.9, found
    assert found.smaller <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("seeds", [4, 8, 12])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
def test_the_intervals_cover_for_every_spread_number_of_seeds_and_ratio(
    spread: float, seeds: int, ratio: float
) -> None:
    found = measure_rates(Setting(ratio, seeds, spread), 1000, seed=1)
    assert 0.92 <= found.edge <= 0.98 and 0.92 <= found.ratio <= 0.98, found
    assert found.smaller <= 0.05 and (ratio > 1 or found.larger <= 0.05), found


def test_the_sensitivity_is_over_the_shared_rates_alone() -> None:
    found = table(4, 4, 4, 2)
    expected = rate_sensitivity(RATES[:2], [list(row) for row in found.losses[:2]], 1.0)
    assert found.sensitivity(RATES[:2], 1.0) == expected
    assert found.sensitivity((0.5, 0.6), 1.0).value is None, "of rates that were not run there is none"
    assert found.best is not None and found.best[0] == 0.004


def described(*found: tuple[str, RateTable]) -> list[dict]:
    def one(label: str, own: RateTable) -> dict:
        base = None if label == "none" else found[0]
        return describe_edge(label, own, base, shared=RATES, untrained=1.0, steps=400) | {"label": label}

    return [one(*pair) for pair in found]


def test_the_advice_is_half_of_a_larger_edge_or_the_baselines_or_the_safe_rate() -> None:
    low, high, same = table(4, 1, 0, 0, seeds=8), table(8, 8, 8, 1, seeds=8), table(4, 2, 0, 0, seeds=8)
    chosen = advice(described(("none", low), ("CS", high)), 400)
    assert chosen == "Train with CS at 0.003: half of its edge for 400 steps."
    plain = advice(described(("none", high), ("CS", same)), 400)
    assert plain.startswith("No method is shown to have a larger edge than the baseline. Train with none at 0.003:")
    unsafe = table(8, 7, 7, 0, seeds=8)
    assert advice(described(("none", unsafe)), 400).endswith(
        "0.001: the largest rate that all its runs survived for 400 steps."
    )
    assert advice(described(("none", table(0, 0, 0, 0))), 400).startswith("No advice")


def test_the_sentence_names_the_length_of_the_runs_and_the_verdict() -> None:
    none, cs = described(("none", table(4, 1, 0, 0, seeds=8)), ("CS", table(8, 8, 7, 1, seeds=8)))
    assert none["sentence"].startswith("none: half of its runs survive 400 steps at a rate of at most 0.0")
    assert "× the edge of none (" in cs["sentence"] and "): larger. All survive up to 0.002." in cs["sentence"]


def test_a_table_whose_rates_do_not_go_up_is_refused() -> None:
    with pytest.raises(ValueError, match="a row for each rate, going up"):
        table(4, 4, 0, 0, rates=(0.002, 0.001, 0.004, 0.008))
