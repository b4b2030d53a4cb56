"""Laws of the speed-up of paired runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.compare import Curve, Speedup, speedup

STEPS = tuple(range(100, 1700, 100))
FEW = settings(max_examples=40)
MIRRORED = {"faster": "slower", "slower": "faster"}


def power_law(speed: float = 1.0, floor: float = 0.1, power: float = 0.5, steps: tuple[int, ...] = STEPS) -> Curve:
    return Curve(steps, tuple(floor + (1 + speed * step / 50) ** -power for step in steps))


def cut(run: Curve, length: int) -> Curve:
    return Curve(run.steps[:length], run.losses[:length], run.seconds_per_step)


losses = st.lists(st.floats(0.01, 10), min_size=len(STEPS), max_size=len(STEPS)).map(tuple)
finished = st.builds(Curve, st.just(STEPS), losses, st.floats(0.01, 100))
lost = st.one_of(
    st.builds(cut, finished, st.integers(0, len(STEPS) - 1)),
    finished.map(lambda run: replace(run, losses=(*run.losses[:-1], math.nan))),
    finished.map(lambda run: replace(run, losses=(*run.losses[:-1], math.inf))),
)
pairs = st.lists(st.tuples(finished, finished), min_size=2, max_size=6)
clocks = st.sampled_from(["steps", "seconds"])


def compare(pairs: list[tuple[Curve, Curve]], clock: str = "steps") -> Speedup:
    return speedup([base for base, _ in pairs], [method for _, method in pairs], clock=clock)  # type: ignore[arg-type]


def numbers(found: Speedup) -> tuple[float, float, float]:
    assert found.value is not None and found.low is not None and found.high is not None
    return found.value, found.low, found.high


@pytest.mark.parametrize("power", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("truth", [0.5, 0.7, 1.1, 1.5, 2.5, 5.0])
def test_a_run_that_is_faster_by_a_factor_has_that_speedup_to_one_percent(truth: float, power: float) -> None:
    runs = [(power_law(speed, power=power), power_law(truth * speed, power=power)) for speed in (0.8, 1.0, 1.3)]
    value = numbers(compare(runs))[0]
    assert value == pytest.approx(truth, rel=0.01)
    # What is left of smoothing a bent curve pulls towards 1, never away from it.
    assert abs(math.log(value)) <= abs(math.log(truth))


@FEW
@given(st.lists(st.tuples(st.one_of(finished, lost), st.one_of(finished, lost)), min_size=2, max_size=6), clocks)
def test_swapping_method_and_baseline_gives_one_over_the_speedup(runs: list[tuple[Curve, Curve]], clock: str) -> None:
    found, other = compare(runs, clock), compare([(method, base) for base, method in runs], clock)
    assert other.verdict == MIRRORED.get(found.verdict, found.verdict)
    assert other.more_seeds == found.more_seeds
    assert (other.diverged, other.baseline_diverged) == (found.baseline_diverged, found.diverged)
    if found.value is not None:
        value, low, high = numbers(other)
        assert numbers(found) == pytest.approx((1 / value, 1 / high, 1 / low), rel=1e-9)


@FEW
@given(pairs, st.integers(2, 1000))
def test_counting_steps_in_another_unit_changes_nothing(runs: list[tuple[Curve, Curve]], unit: int) -> None:
    scaled = [tuple(replace(run, steps=tuple(unit * step for step in run.steps)) for run in pair) for pair in runs]
    assert numbers(compare(scaled)) == pytest.approx(numbers(compare(runs)), rel=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(("factor", "shift"), [(2.0, 0.0), (0.5, 3.0), (1.0, -2.0)])
def test_another_unit_or_zero_of_the_loss_changes_nothing(factor: float, shift: float) -> None:
    runs = [(power_law(speed), power_law(1.4 * speed + 0.1)) for speed in (0.8, 1.0, 1.3)]
    moved = [tuple(replace(run, losses=tuple(factor * x + shift for x in run.losses)) for run in pair) for pair in runs]
    assert numbers(compare(moved)) == pytest.approx(numbers(compare(runs)), rel=1e-9)  # type: ignore[arg-type]


@FEW
@given(pairs, st.floats(0.001, 5))
def test_a_method_with_lower_losses_is_never_slower(runs: list[tuple[Curve, Curve]], drop: float) -> None:
    better = [(base, replace(run, losses=tuple(loss - drop for loss in run.losses))) for base, run in runs]
    assert numbers(compare(better))[0] >= numbers(compare(runs))[0] * (1 - 1e-9)


@FEW
@given(pairs, st.randoms())
def test_the_order_of_the_seeds_does_not_matter(runs: list[tuple[Curve, Curve]], random) -> None:
    mixed = list(runs)
    random.shuffle(mixed)
    assert numbers(compare(mixed)) == pytest.approx(numbers(compare(runs)), rel=1e-9)


@FEW
@given(pairs, clocks)
def test_the_verdict_is_faster_or_slower_only_if_the_interval_is_without_1(runs, clock: str) -> None:
    found = compare(runs, clock)
    value, low, high = numbers(found)
    assert low <= value * (1 + 1e-12) and value <= high * (1 + 1e-12)
    assert (found.verdict == "faster") == (low > 1)
    assert (found.verdict == "slower") == (high < 1)


def test_equal_runs_have_a_speedup_of_exactly_1_and_no_difference() -> None:
    found = compare([(power_law(speed), power_law(speed)) for speed in (0.8, 1.0, 1.3)])
    assert numbers(found) == (1.0, 1.0, 1.0)
    assert (found.verdict, found.more_seeds) == ("no difference shown", None)


def test_in_seconds_nobody_waits_for_a_run_that_diverged() -> None:
    runs = [(power_law(speed), power_law(1.4 * speed)) for speed in (0.8, 1.0, 1.3)]
    timed = [(replace(base, seconds_per_step=0.05), replace(method, seconds_per_step=0.05)) for base, method in runs]
    # So early that nobody knows what a step of it took.
    lost = (replace(cut(power_law(), 1), seconds_per_step=1.0), timed[0][1])
    assert numbers(compare([*timed, lost], "seconds")) == numbers(compare([*timed, lost], "steps"))


def test_in_seconds_a_step_that_takes_twice_as_long_halves_the_speedup() -> None:
    runs = [(power_law(speed), replace(power_law(1.4 * speed), seconds_per_step=2.0)) for speed in (0.8, 1.0, 1.3)]
    expected = [x / 2 for x in numbers(compare(runs))]
    assert numbers(compare(runs, "seconds")) == pytest.approx(expected, rel=1e-12)


@FEW
@given(pairs, st.lists(st.tuples(finished, lost), min_size=1, max_size=3))
def test_leaving_out_diverged_runs_of_the_method_would_never_make_it_look_worse(whole, broken) -> None:
    found, without = compare([*whole, *broken]), compare(whole)
    assert found.diverged == len(broken)
    assert found.value is None or found.value <= numbers(without)[0] * (1 + 1e-12)
    if found.verdict == "faster":
        assert without.verdict == "faster"


@pytest.mark.parametrize("ending", [math.nan, math.inf])
def test_a_diverged_run_counts_as_the_slowest_that_a_curve_can_show(ending: float) -> None:
    run, whole = power_law(), (power_law(), power_law(1.4))
    broken = replace(run, losses=(*run.losses[:8], *[ending] * 8))
    alone = numbers(compare([whole] * 4))[0]
    for diverged in (broken, cut(run, 8), Curve((), ()), Curve((37,), (ending,))):
        found = compare([whole, whole, whole, (run, diverged)])
        assert numbers(found)[0] == pytest.approx((alone**3 * STEPS[0] / STEPS[-1]) ** 0.25)
        assert (found.diverged, found.verdict) == (1, "no difference shown")


def test_a_run_that_blows_up_to_a_finite_loss_counts_as_slowest_too() -> None:
    run = power_law()
    blown_up = replace(run, losses=(*run.losses[:8], *[1e3] * 8))
    assert numbers(compare([(run, blown_up)] * 2))[0] == pytest.approx(STEPS[0] / STEPS[-1])


def test_a_run_that_gets_worse_again_has_reached_its_final_loss_at_its_end_only() -> None:
    run = power_law()
    worse_again = replace(run, losses=(*run.losses[:8], *[run.losses[3]] * 8))
    assert numbers(compare([(run, worse_again)] * 2))[0] == pytest.approx(STEPS[3] / STEPS[-1], rel=0.01)


def test_runs_that_both_diverged_are_equal() -> None:
    whole, both = (power_law(), power_law(1.4)), (cut(power_law(), 3), cut(power_law(), 5))
    found = compare([whole, whole, whole, both])
    assert numbers(found)[0] == pytest.approx(numbers(compare([whole] * 3))[0] ** 0.75)
    assert (found.diverged, found.baseline_diverged) == (1, 1)


def test_one_broken_evaluation_on_the_way_is_not_a_divergence() -> None:
    run = power_law(1.4)
    shaken = replace(run, losses=(*run.losses[:4], math.nan, *run.losses[5:]))
    found = compare([(power_law(), shaken)] * 2)
    assert found.diverged == 0
    assert numbers(found)[0] == pytest.approx(1.4, rel=0.02)


def test_the_loss_before_training_does_not_count() -> None:
    runs = [*((power_law(), power_law(speed)) for speed in (1.3, 1.5)), (power_law(), cut(power_law(), 3))]
    begun = [tuple(Curve((0, *run.steps), (9.0, *run.losses)) for run in pair) for pair in runs]
    assert compare(begun) == compare(runs)  # type: ignore[arg-type]


def test_nothing_is_judged_of_fewer_than_two_pairs_mostly_diverged_runs_or_single_evaluations() -> None:
    run, faster, broken = power_law(), power_law(1.4), cut(power_law(), 3)
    for runs in (
        [],
        [(run, faster)],
        [(run, faster), (run, broken), (run, broken)],
        [(cut(run, 1), cut(faster, 1))] * 3,
    ):
        found = compare(runs)
        assert (found.verdict, found.low, found.high, found.more_seeds) == ("cannot be judged", None, None, None)
    lost = Curve((37,), (math.inf,))
    assert "3 of 3 runs of CS and 3 of 3 runs of none diverged" in compare([(lost, lost)] * 3).sentence("CS", "none")
    assert compare([(run, faster)]).value == pytest.approx(1.4, rel=0.01)


@FEW
@given(st.lists(st.floats(0.5, 3.0), min_size=2, max_size=4))
def test_half_of_the_runs_diverged_can_still_be_judged_but_not_as_faster(speeds: list[float]) -> None:
    whole = [(power_law(), power_law(speed)) for speed in speeds]
    found = compare([*whole, *[(power_law(), cut(power_law(), 3))] * len(whole)])
    assert found.verdict in ("no difference shown", "slower")


def test_runs_that_are_not_paired_or_not_curves_are_refused() -> None:
    with pytest.raises(ValueError, match="in pairs of the same seed: there are 2 and 1"):
        speedup([power_law()] * 2, [power_law()])
    with pytest.raises(ValueError, match="one loss for each step, not 1 for 2"):
        Curve((1, 2), (1.0,))
    for steps in ((1, 1), (2, 1), (-5, 1)):
        with pytest.raises(ValueError, match="must grow from 0 on"):
            Curve(steps, (1.0, 1.0))
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="must be above 0"):
            Curve((1,), (1.0,), seconds)


def test_a_method_that_is_much_better_from_the_first_evaluation_on_has_the_largest_speedup_to_be_seen() -> None:
    runs = [(power_law(floor=1.0), power_law(floor=0.0, speed=speed)) for speed in (50.0, 80.0)]
    found, other = compare(runs), compare([(method, base) for base, method in runs])
    assert numbers(found)[0] == pytest.approx(STEPS[-1] / STEPS[0])
    assert (found.early, found.baseline_early, found.bound, found.varies) == (2, 0, "at least", False)
    assert (other.early, other.baseline_early, other.bound, other.varies) == (0, 2, "at most", False)


def test_pairs_of_which_the_curves_show_all_and_runs_that_diverged_are_not_cut_off() -> None:
    run, faster, best = power_law(floor=1.0), power_law(1.4, floor=1.0), power_law(50.0, floor=0.0)
    assert compare([(run, faster), (run, run), (run, cut(run, 3))]).bound is None
    assert compare([(run, faster), (run, best)]).bound == "at least"
    assert compare([(run, best), (best, run)]).bound is None, "one may be more, the other less"
