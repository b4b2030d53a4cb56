"""The search for the edge: a comparison that grows, and ends with the same runs however often it was stopped."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import assert_fails, run
from comparison_cases import TINY, tiny_plan
from test_cli_compare import OVERRIDES, WORKERS, in_processes, tables

from scalelong.cli.edge_display import print_edges
from scalelong.compare import search
from scalelong.compare.collect import RunRecord
from scalelong.compare.grid import Plan, PlanError, check_plan, save_plan
from scalelong.compare.outcome import Outcome
from scalelong.compare.results import Metadata, summarise
from scalelong.compare.run import CompareResult
from scalelong.compare.search import EdgeSearch, find_edges, make_search, rates_in
from scalelong.report import read_content, render
from scalelong.report.blocks import Gallery, Text
from scalelong.runs import Run
from scalelong.sampling.images import save_grid

EDGES = {"none": 0.006, "cs": 0.012}
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)


def tiny_search(*methods: str, seeds: int = 6, rates: tuple[float, ...] = RATES) -> EdgeSearch:
    return make_search("digits", methods or ("none", "cs"), seeds=seeds, rates=rates, overrides=TINY)


def records_of(plan: Plan) -> dict[str, list[RunRecord]]:
    """Every run of a plan, ended: a seed fails above the edge of its method and a little of its own."""

    def record(method: str, rate: float, seed: int, folder: str) -> RunRecord:
        survives = rate < EDGES[method] * 1.2 ** (seed - 2.5)
        losses = {step: (0.2 if survives else 1.0) + 0.1 / step + 0.1 * abs(math.log(rate / 0.004)) for step in (5, 10)}
        ended = (
            Outcome("finished", 10, None, 1.2) if survives else Outcome("failed", 10, "…", 1.2, cause="did not learn")
        )
        return RunRecord(seed, folder, 10, ended, losses)

    return {
        arm.id: [record(arm.method.name, arm.axes["lr"], seed, f"runs/{arm.id}/seed-{seed}") for seed in plan.seeds]
        for arm in plan.arms
    }


class Engine:
    """In the place of `compare`: what it would write, and what it was asked for; a signal stops one of its calls."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.asked: list[int] = []
        self.stop_at = stop_at

    def __call__(self, plan: Plan, out: Path, **options: Any) -> CompareResult:
        save_plan(out, plan, "the same")
        self.asked.append(len(plan.arms))
        results = summarise(plan, records_of(plan), Metadata("the same", "then", workers=1, threads=1))
        (out / "results.json").write_text(json.dumps(results))
        stopped = signal.SIGTERM if len(self.asked) == self.stop_at else None
        return CompareResult(out, results, stopped, {})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(search, "compare", made)
    return made


def test_the_search_ends_close_to_each_edge_with_one_comparison_that_grew(engine: Engine, tmp_path: Path) -> None:
    results = find_edges(tiny_search(), tmp_path / "out").results
    assert engine.asked == sorted(engine.asked) and engine.asked[0] == 8 and len(engine.asked) > 2
    none, cs = results["rate_sensitivity"]
    for sweep, truth in ((none, EDGES["none"]), (cs, EDGES["cs"])):
        assert sweep["edge"]["low"] < truth < sweep["edge"]["high"]
    assert cs["ratio"]["value"] == pytest.approx(2, rel=0.1) and cs["ratio"]["verdict"] == "larger"
    assert none["ratio"] is None and results["advice"].startswith("Train with CS κ=0.7 at 0.00")
    assert set(none["rates"]) != set(cs["rates"]), "each is looked at closely near its own edge"
    assert none["sensitivity"]["value"] is not None
    arms = {arm["id"] for arm in results["arms"]}
    settings = {pair["setting"] for pair in results["comparisons"]}
    assert len(settings) < len({arm["setting"] for arm in results["arms"]}), "a rate of one method alone makes no pair"
    assert {f"cs-lr{rate:g}" for rate in cs["rates"]} | {f"none-lr{rate:g}" for rate in none["rates"]} == arms


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_stopped_in_any_round_it_resumes_to_the_same_runs(
    stop_at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(search, "compare", Engine())
    whole = find_edges(tiny_search(), tmp_path / "whole").results
    monkeypatch.setattr(search, "compare", Engine(stop_at))
    assert find_edges(tiny_search(), tmp_path / "out").signal == signal.SIGTERM
    again = Engine()
    monkeypatch.setattr(search, "compare", again)
    resumed = find_edges(tiny_search(), tmp_path / "out").results
    assert again.asked[0] >= 8 and resumed["rate_sensitivity"] == whole["rate_sensitivity"]
    assert [arm["id"] for arm in resumed["arms"]] == [arm["id"] for arm in whole["arms"]]


def test_more_seeds_extend_a_search_and_other_rates_or_a_comparison_are_refused(engine: Engine, tmp_path: Path) -> None:
    find_edges(tiny_search(), tmp_path / "out")
    more = find_edges(tiny_search(seeds=8), tmp_path / "out").results
    assert all(sweep["seeds"] == 8 for sweep in more["rate_sensitivity"])
    with pytest.raises(PlanError, match="looks for the edge from the rates"):
        check_plan(tmp_path / "out", tiny_search(rates=(2e-3, 4e-3), seeds=8).plan(rates_in(tmp_path / "out")))
    save_plan(tmp_path / "other", tiny_plan("none", "cs", seeds=6, rates=[2e-3, 4e-3]), "first")
    with pytest.raises(PlanError, match=r"from the rates \[\], not from"):
        check_plan(tmp_path / "other", tiny_search(rates=(2e-3, 4e-3)).plan({}))


def test_the_first_rates_are_half_to_eight_times_the_recipes() -> None:
    assert make_search("digits", ["none"]).first.edge_rates == (0.002, 0.004, 0.008, 0.016, 0.032)
    with pytest.raises(PlanError, match="give at least two, not 0.01 alone"):
        make_search("digits", ["none"], rates=[0.01])


def test_it_prints_survivors_edges_sentences_and_the_advice(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    results = find_edges(tiny_search(), tmp_path / "out").results
    print_edges(results)
    said = capsys.readouterr().out
    assert "digits, 10 steps: seeds that survive, by learning rate" in said and "6 of 6" in said
    assert all(sweep["sentence"] in said for sweep in results["rate_sensitivity"]) and results["advice"] in said


def test_its_page_opens_on_the_survival_curves_and_says_what_was_found(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    results = find_edges(tiny_search(), tmp_path / "out").results
    content = read_content([tmp_path / "out"])
    assert content.parts[0].sections[0].title == "Edge of stability"
    chart = content.charts[0]
    assert chart.title == "Survival by learning rate" and [one.name for one in chart.views[0].series] == [
        "none",
        "CS κ=0.7",
    ]
    assert chart.views[0].series[0].points[0] == (0.002, 1.0) and chart.views[0].series[0].band
    page = render(content)
    assert results["advice"] in page and results["rate_sensitivity"][1]["sentence"] in page
    assert "Nothing unusual" not in page and "failed: did not learn" in page, "runs that fail are named here too"


def test_its_page_shows_samples_of_a_survivor_beside_those_of_a_failed_run_of_the_same_seed_and_rate(
    engine: Engine, tmp_path: Path
) -> None:
    pytest.importorskip("jinja2")
    found = find_edges(tiny_search(), tmp_path / "out").results
    for arm in found["arms"]:
        for one in arm["runs"]:
            run = Run(tmp_path / "out" / one["folder"])
            run.folder.mkdir(parents=True)
            run.metrics.path.touch()
            save_grid(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), run.grid(10))
    sections = read_content([tmp_path / "out"]).parts[0].sections
    assert [one.key for one in sections[:3]] == ["c0-edge", "c0-warnings", "c0-stability"]
    titles = [block.title for block in sections[0].blocks if not isinstance(block, Text)]
    assert titles[:2] == ["Survival by learning rate", "Samples of a run that survived, and of one that failed"]
    (gallery,) = [block for block in sections[0].blocks if isinstance(block, Gallery)]
    survivor, failed = gallery.pictures
    assert (survivor.label, failed.label) == ("CS κ=0.7: survived", "none: failed")
    assert survivor.detail == failed.detail == "lr 0.004, seed 0, step 10"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "none,nonsense"], "there is no method 'nonsense'"),
        (["--lr", "0.01"], "give at least two, not 0.01 alone"),
        (["--seeds", "0"], "at least one seed, got 0"),
    ],
)
def test_what_cannot_be_searched_is_said_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert_fails(run("edge", "digits", *arguments, "--out", tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_the_first_runs_and_writes_nothing(tmp_path: Path) -> None:
    sets = [part for override in TINY for part in ("--set", override)]
    arguments = ["edge", "digits", "--methods", "none,cs", "--seeds", 2, "--lr", "4e-3,8e-3", *sets]
    done = run(*arguments, "--out", tmp_path / "out", "--workers", 1, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "cs-lr0.008: CS κ=0.7, lr 0.008, depth 4, batch 16" in done.stdout
    assert "8 runs: 4 arms × 2 seeds (0, 1), 10 steps each" in done.stdout and "closer to the edge" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_it_gives_the_same_tables_as_left_alone(tmp_path: Path) -> None:
    """In processes of its own, with runs that are stopped when they have clearly failed."""
    arguments = ["edge", "digits", "--methods", "none,cs", "--seeds", "1", "--lr", "4e-2,4e-1", *WORKERS]
    arguments += [part for override in OVERRIDES for part in ("--set", override)]
    folder = in_processes(tmp_path, arguments, {"killed": ["SIGKILL", "SIGTERM"]})
    whole, killed = tables(folder / "whole"), tables(folder / "killed")
    assert killed == whole and len(whole["edge_rates"]) == 2 < len(whole["arms"]) / 2
