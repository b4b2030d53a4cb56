"""What results.json says of runs whose numbers are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
from comparison_cases import tiny_plan

from scalelong.compare.collect import RunRecord
from scalelong.compare.outcome import SIGMAS, Outcome
from scalelong.compare.results import Metadata, summarise

STEPS = (2, 4, 6, 8, 10)
PLAN = tiny_plan("none", "cs", seeds=3)
METADATA = Metadata("the same", "then", workers=1, threads=1)


def finished(seed: int, *, loss: float = 1.0, distance: float = 50.0, swing: float = 0.1) -> RunRecord:
    """A run to the end, each of whose numbers a little differs from seed to seed."""
    own = 1 + 0.01 * seed**2
    losses = {step: loss * own * (1 + 1 / step) for step in STEPS}
    readings = dict.fromkeys(STEPS[2:], swing * own)
    return RunRecord(
        seed,
        f"runs/{seed}",
        10,
        Outcome("finished", 10, None, 9.0, tuple(loss + sigma for sigma in SIGMAS)),
        losses,
        {10: distance * own},
        distance_name="FD-EffNet",
        oscillation={"feature": readings, "gradient": readings},
    )


def failed(seed: int, *readings: float) -> RunRecord:
    """A run that the guard gave up at step 7."""
    seen = dict(zip(STEPS[2:], readings, strict=False))
    return RunRecord(
        seed,
        f"runs/{seed}",
        7,
        Outcome("failed", 7, "not finite", 9.0, cause="given up"),
        dict(zip(STEPS[:3], (3.0, 2.0, 1.5), strict=True)),
        oscillation={"feature": seen, "gradient": seen},
    )


def arm_of(*runs: RunRecord) -> dict[str, Any]:
    """What is said of CS, if these are its runs."""
    records = {"none": [finished(seed) for seed in range(3)], "cs": list(runs)}
    return next(arm for arm in summarise(PLAN, records, METADATA)["arms"] if arm["id"] == "cs")


@pytest.mark.parametrize(
    ("key", "option"), [("final_loss", "loss"), ("final_fd", "distance"), ("oscillation", "swing")]
)
def test_a_difference_is_the_method_minus_the_baseline_so_that_below_0_the_method_is_lower(
    key: str, option: str
) -> None:
    base: dict[str, Any] = {"loss": 1.0, "distance": 50.0, "swing": 0.1}
    lower = {**base, option: 0.8 * base[option]}
    records = {
        "none": [finished(seed, **base) for seed in range(3)],
        "cs": [finished(seed, **lower) for seed in range(3)],
    }
    (pair,) = summarise(PLAN, records, METADATA)["comparisons"]
    assert (pair["arm"], pair["baseline"], pair["pairs"]) == ("cs", "none", 3)
    assert pair[key]["low"] < pair[key]["difference"] < pair[key]["high"] < 0
    swapped = summarise(PLAN, {"none": records["cs"], "cs": records["none"]}, METADATA)["comparisons"][0]
    assert swapped[key]["difference"] == pytest.approx(-pair[key]["difference"])
    assert (pair["verdict"], swapped["verdict"]) == (
        ("faster", "slower") if option == "loss" else ("no difference shown",) * 2
    )


def test_a_figure_that_a_run_which_ended_lacks_is_not_that_of_the_others() -> None:
    found = arm_of(finished(0), finished(1), failed(2))
    assert found["final_loss"]["value"] is found["final_fd"] is found["noise_robustness"] is None
    assert found["oscillation"] == {"feature": None, "gradient": None}
    assert found["failed"]["count"] == 1


def test_a_run_that_has_not_ended_keeps_no_figure_from_the_others() -> None:
    found = arm_of(finished(0), finished(1), RunRecord(2, "runs/2"))
    assert found["noise_robustness"]["mean"] == pytest.approx([1 + sigma for sigma in SIGMAS])
    assert found["oscillation"]["feature"]["value"] == pytest.approx(0.1 * 1.005)


def test_the_oscillation_curve_is_that_of_the_runs_which_were_read() -> None:
    read = {"steps": list(STEPS[2:]), "feature": pytest.approx([0.1005] * 3), "gradient": pytest.approx([0.1005] * 3)}
    begun = RunRecord(2, "runs/2", 1, oscillation={"feature": {}, "gradient": {}})
    assert arm_of(finished(0), finished(1), failed(2))["oscillation_curve"] == read
    assert arm_of(finished(0), finished(1), begun)["oscillation_curve"] == read
    late = arm_of(finished(0), finished(1), failed(2, 0.9))
    assert late["oscillation_curve"]["steps"] == [6], "from there on the mean of the others would flatter"
    assert late["oscillation"]["feature"]["value"] == pytest.approx((0.1 + 0.101 + 0.9) / 3)


def test_a_loss_that_is_not_finite_is_null() -> None:
    found = arm_of(finished(0), finished(1), finished(2, loss=math.inf))
    assert found["final_loss"] == {"value": None, "low": None, "high": None}
    assert found["runs"][2]["final_loss"] is None
