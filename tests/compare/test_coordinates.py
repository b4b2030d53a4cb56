"""The coordinate check: it passes in μP, fails in the standard parametrization, and says how sure it is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_fails, run, sets

from scalelong.compare.coordinates import BlockSlope, slope_of

TINY = (
    "model.depth=2",
    "model.num_heads=8",
    "training.batch_size=32",
    "data.validation_count=8",
    "scaling.method=none",
)
FEW = ("--widths", "32,64,128", "--steps", 4, "--seeds", 3, *sets(*TINY))
WIDTHS = (32, 64, 128, 256)


def block(*changes: tuple[float, ...]) -> BlockSlope:
    return BlockSlope("mid_block", WIDTHS, changes)


def spread(power: float, noise: float = 0.02) -> BlockSlope:
    """Three seeds whose change grows with that power of the width."""
    return block(*((width**power * (1 - noise), width**power, width**power * (1 + noise)) for width in WIDTHS))


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.0, 0.5, 1.0])
def test_the_slope_of_a_power_law_is_its_power_within_the_interval(power: float) -> None:
    slope = spread(power).slope
    assert slope.value == pytest.approx(power, abs=1e-9)
    assert slope.low is not None and slope.high is not None and slope.low < power < slope.high


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (spread(0.0), "ok"),
        (spread(0.1), "ok"),
        (spread(0.5), "grows"),
        (spread(-0.5), "shrinks"),
        (block((1.0, 3.0), (2.0, 0.5), (0.4, 2.0), (3.0, 0.6)), "unclear"),
        (block((1.0, 1.0), (1.0, 1.0), (1.0, math.nan), (1.0, 1.0)), "unclear"),
        (block((0.0, 0.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)), "unclear"),
    ],
)
def test_a_block_passes_only_where_its_whole_interval_is_flat(found: BlockSlope, verdict: str) -> None:
    assert found.verdict == verdict


def test_the_interval_of_a_slope_is_that_of_a_regression() -> None:
    # That of scipy, whose error times the quantile of 4 degrees of freedom is half the width.
    found = slope_of([1, 1, 2, 2, 4, 4], [1.0, 1.2, 1.5, 1.3, 1.9, 2.3])
    from scipy.stats import linregress, t

    xs, ys = ([math.log(x) for x in values] for values in ([1, 1, 2, 2, 4, 4], [1.0, 1.2, 1.5, 1.3, 1.9, 2.3]))
    expected: Any = linregress(xs, ys)
    half = t.ppf(0.975, 4) * expected.stderr
    assert (found.value, found.low) == pytest.approx((expected.slope, expected.slope - half))


@pytest.mark.parametrize(("parametrization", "code"), [("standard", 1), ("mup", 0)])
def test_the_command_passes_in_mup_and_fails_for_standard(parametrization: str, code: int, tmp_path: Path) -> None:
    done = run("coordcheck", "digits", *FEW, "--out", tmp_path, *sets(f"model.parametrization={parametrization}"))
    assert done.exit_code == code, done.output
    found = json.loads((tmp_path / "coordcheck.json").read_text())
    assert found["passed"] == (code == 0)
    # What follows the output layer has one size at every width, and is not judged.
    assert [one["block"] for one in found["blocks"]][-1] == "decoder_pred"
    assert {"coordcheck.json", "report.html", "change.png", "slope.svg"} <= {path.name for path in tmp_path.iterdir()}
    if code:
        assert {one["verdict"] for one in found["blocks"] if "blocks" in one["block"]} == {"grows"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--widths", "32,64"), "a slope takes three widths or more"),
        (("--widths", "32,64,72"), "72 is no multiple of 16, the size of a head"),
        (("--set", "model.base_width=24", "--set", "model.parametrization=mup"), "24 is no multiple of 16"),
    ],
)
def test_what_cannot_be_checked_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert_fails(run("coordcheck", "digits", *arguments), message)
