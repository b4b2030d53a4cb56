"""Transfers: where the best rate of each width is, whether it moves, and what is told to do."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_fails, run, sets
from comparison_cases import TINY

from scalelong.compare.collect import RunRecord
from scalelong.compare.grid import Plan, PlanError, check_plan, save_plan
from scalelong.compare.outcome import Outcome
from scalelong.compare.results import Metadata, summarise, write_results
from scalelong.compare.survival import RateTable
from scalelong.compare.transfer import Family, best_log, make_transfer
from scalelong.config import load_recipe
from scalelong.report import read_content, render
from scalelong.report.blocks import Chart

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
OWN = (*TINY, "model.num_heads=2")


def transfer(*widths: int, seeds: int = 3, methods: tuple[str, ...] = (), rates: tuple[float, ...] = RATES) -> Plan:
    return make_transfer("digits", widths or (16, 32, 64), rates=rates, seeds=seeds, methods=methods, overrides=OWN)


def loss(rate: float, best: float, seed: int = 0) -> float:
    """A parabola over the logarithm of the rate, around a best rate that differs a little from seed to seed."""
    return 0.1 + 0.05 * math.log2(rate / best / 1.05 ** (seed - 1)) ** 2 + 0.01 * seed


def records_of(plan: Plan, standard: float = 1.0, mup: float = 0.0) -> dict[str, list[RunRecord]]:
    """Runs whose best rate is 8e-3 at the base and falls with a power of the width, another in each parametrization."""
    base = min(arm.axes["width"] for arm in plan.arms)

    def record(axes: dict[str, Any], seed: int, folder: str) -> RunRecord:
        power = mup if axes["parametrization"] == "mup" else standard
        found = loss(axes["lr"], 8e-3 * (axes["width"] / base) ** -power, seed)
        return RunRecord(seed, folder, 10, Outcome("finished", 10, None, 1.5), {5: 1.0, 10: found})

    return {arm.id: [record(arm.axes, seed, f"runs/{arm.id}/{seed}") for seed in plan.seeds] for arm in plan.arms}


def found_by(plan: Plan, **powers: float) -> dict[str, Any]:
    return summarise(plan, records_of(plan, **powers), Metadata("scalelong transfer digits", "now", 1, 1))


@pytest.mark.parametrize("best", [2.1e-3, 4e-3, 7.7e-3])
def test_the_best_rate_of_a_parabola_is_its_vertex_whatever_the_rates_are(best: float) -> None:
    for rates in (RATES, (1e-3, 3e-3, 5e-3, 2e-2)):
        assert math.exp(best_log(rates, [loss(rate, best, seed=1) for rate in rates], 99.0)) == pytest.approx(best)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e9])
def test_how_far_a_run_diverged_does_not_move_the_best_rate(bad: float) -> None:
    found = best_log((1.0, 2.0, 4.0), (0.5, 0.3, bad), 1.0)
    assert found == best_log((1.0, 2.0, 4.0), (0.5, 0.3, 1.0), 1.0)
    assert math.log(1) < found < math.log(4)


def test_the_smallest_width_is_run_once_for_both_parametrizations() -> None:
    arms = transfer().arms
    assert len(arms) == len(RATES) * (1 + 2 * 2)
    assert {arm.axes["parametrization"] for arm in arms if arm.axes["width"] == 16} == {"standard"}
    assert {arm.config.model.base_width for arm in arms} == {16}
    heads = {(arm.axes["width"], arm.config.model.model_dump()["num_heads"]) for arm in arms}
    assert heads == {(16, 2), (32, 4), (64, 8)}


def test_a_best_rate_that_falls_with_the_width_moves_and_one_that_stays_does_not() -> None:
    (found,) = found_by(transfer())["transfer"]
    standard, mup = found["families"]
    assert [one["best"]["value"] for one in standard["widths"]] == pytest.approx([8e-3, 4e-3, 2e-3], rel=1e-6)
    assert [one["best"]["value"] for one in mup["widths"]] == pytest.approx([8e-3] * 3, rel=1e-6)
    assert (standard["shift"]["value"], standard["shift"]["verdict"]) == (pytest.approx(0.25), "moves")
    assert (mup["shift"]["value"], mup["shift"]["verdict"]) == (pytest.approx(1.0), "does not move")
    for one in (*standard["widths"], *mup["widths"]):
        assert one["best"]["low"] < one["best"]["value"] < one["best"]["high"]


def test_the_advice_is_a_command_that_trains_the_largest_width_at_the_rate_of_the_smallest() -> None:
    (found,) = found_by(transfer())["transfer"]
    assert found["advice"].startswith("Tune at width 16, train at width 64: scalelong train digits --set ")
    words = shlex.split(found["advice"].partition(": ")[2])
    config = load_recipe(words[2], [word for word in words[3:] if word != "--set"])
    model: Any = config.model
    assert (model.embed_dim, model.num_heads, model.parametrization, model.base_width) == (64, 8, "mup", 16)
    assert config.optim.lr == 8e-3
    assert len(words[4::2]) == len({word.partition("=")[0] for word in words[4::2]})


def test_nothing_is_advised_where_the_best_rate_of_mup_moves() -> None:
    (found,) = found_by(transfer(), mup=1.0)["transfer"]
    assert found["advice"].startswith("No advice")


def test_mup_at_the_carried_rate_is_compared_with_standard_at_its_own_best() -> None:
    (found,) = found_by(transfer())["transfer"]
    assert found["carried"]["rates"] == [8e-3, 2e-3]
    assert found["carried"]["difference"]["value"] == pytest.approx(0.0, abs=1e-9)
    assert "At width 64 μP at 0.008, the best rate of width 16, ends at" in found["carried"]["sentence"]


def family(*bests: float, seeds: int = 3, rates: tuple[float, ...] = RATES) -> Family:
    """Widths 16, 32, … with these best rates."""

    def table(best: float) -> RateTable:
        losses = tuple(tuple(loss(rate, best, seed) for seed in range(seeds)) for rate in rates)
        return RateTable(tuple(range(seeds)), rates, tuple((True,) * seeds for _ in rates), losses)

    return Family("mup", {16 * 2**k: table(best) for k, best in enumerate(bests)}, 99.0)


@pytest.mark.parametrize(
    ("found", "verdict", "bound"),
    [
        (family(4e-3, 4e-3), "does not move", None),
        (family(4e-3, 5.5e-3), "does not move", None),
        (family(4e-3, 1.2e-2), "moves", None),
        (family(1.2e-2, 4e-3), "moves", None),
        # At an end of the rates the best lies there or beyond.
        (family(8e-3, 1e-4), "moves", "at most"),
        (family(2e-3, 1e-4), "cannot be told", "at most"),
        (family(4e-3, 1.0), "moves", "at least"),
        (family(1.0, 1.0), "cannot be told", None),
        (family(4e-3, 4e-3, seeds=1), "cannot be told", None),
    ],
)
def test_a_shift_is_told_only_as_far_as_the_rates_and_seeds_show_it(
    found: Family, verdict: str, bound: str | None
) -> None:
    assert (found.verdict, found.shift.bound) == (verdict, bound)


def test_widths_are_paired_by_the_seeds_that_both_have() -> None:
    whole = family(4e-3, 2e-3, seeds=4)
    narrow, wide = whole.tables[16], whole.tables[32]
    fewer = replace(
        wide,
        seeds=wide.seeds[:2],
        survived=tuple(x[:2] for x in wide.survived),
        losses=tuple(x[:2] for x in wide.losses),
    )
    assert Family("mup", {16: narrow, 32: fewer}, 99.0).shift.value == pytest.approx(0.5)


def test_a_width_without_a_whole_seed_says_nothing_yet() -> None:
    plan = transfer()
    records = records_of(plan)
    last = plan.arms[-1].id
    records[last] = [replace(run, outcome=None) for run in records[last]]
    assert summarise(plan, records, Metadata("", "now", 1, 1))["transfer"] == []


def test_methods_are_judged_each_by_itself() -> None:
    found = found_by(transfer(methods=("none", "cs")))["transfer"]
    assert [one["method"] for one in found] == ["none", "cs"]
    assert "scaling.method=none" in found[0]["advice"] and "scaling.method=cs" in found[1]["advice"]


def test_a_transfer_may_grow_by_rates_widths_and_seeds_but_not_change(tmp_path: Path) -> None:
    save_plan(tmp_path, transfer(16, 32, seeds=2, rates=RATES[1:]), "")
    check_plan(tmp_path, transfer(16, 32, 64))
    with pytest.raises(PlanError, match="width16-cs-lr0.002, which is not asked for now"):
        check_plan(tmp_path, transfer(8, 16, 32))


def test_the_page_shows_the_losses_of_every_width_and_the_advice(tmp_path: Path) -> None:
    plan = transfer()
    save_plan(tmp_path, plan, "")
    write_results(tmp_path, found_by(plan))
    content = read_content([tmp_path])
    (chart,) = [one for one in content.charts if one.key.endswith("-transfer")]
    assert [view.name for view in chart.views] == ["standard", "μP"]
    assert [series.name for series in chart.views[0].series] == ["width 16", "width 32", "width 64"]
    assert isinstance(chart, Chart) and chart.log_x
    assert "Tune at width 16, train at width 64" in render(content)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--widths", "32"), "a transfer goes from one width to others"),
        (("--widths", "32,72"), "--widths: 72 is no multiple of 16, the size of a head"),
        (("--widths", "32,64", "--lr", "1e-3,2e-3"), "a best rate lies between others"),
        (("--widths", "32,x"), "--widths takes numbers"),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert_fails(run("transfer", "digits", *arguments), message)


def test_a_dry_run_lists_the_arms_and_writes_nothing(tmp_path: Path) -> None:
    done = run(
        "transfer",
        "digits",
        "--widths",
        "16,32",
        "--lr",
        "4e-3,8e-3,1.6e-2",
        "--dry-run",
        "--out",
        tmp_path / "x",
        *sets(*OWN),
    )
    assert done.exit_code == 0, done.output
    assert "mup-width32-cs-lr0.016: CS κ=0.7, μP, width 32, lr 0.016" in done.output
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_whole_transfer_is_run_printed_and_resumed(tmp_path: Path) -> None:
    command = ("transfer", "digits", "--widths", "16,32", "--lr", "1e-3,4e-3,1.6e-2", "--seeds", 2, "--workers", 2)
    done = run(*command, "--out", tmp_path / "x", *sets(*OWN))
    assert done.exit_code == 0, done.output
    assert "μP: the best rate is" in done.output
    found = json.loads((tmp_path / "x/results.json").read_text())
    assert (found["status"], found["runs_total"]) == ("finished", 18)
    again = run(*command, "--out", tmp_path / "x", *sets(*OWN))
    assert "18 of 18 runs done" not in again.output and again.exit_code == 0
