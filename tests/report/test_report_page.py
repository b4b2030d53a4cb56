"""The page of `scalelong report`, read as text: what it says, what it never says, and that it stands by itself."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from report_cases import HOSTILE, LABELS, METHODS, edited, write_comparison, write_json, write_run
from report_page import Page, hostile_comparison, hostile_run, page_of

from scalelong.report import read_content, render
from scalelong.report.blocks import Interval, Intervals, IntervalScale
from scalelong.report.comparison import read_comparison
from scalelong.report.comparison_page import numbers_table
from scalelong.report.numbers import Estimate
from scalelong.report.page import RELOAD_SECONDS

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

LARGEST = 5_000_000


KINDS = [("comparison",), ("rates",), ("running",), ("single",), ("half",), ("lost",)]
KINDS += [("single", "half", "lost"), ("comparison", "rates", "single")]


@pytest.mark.parametrize("names", KINDS, ids="+".join)
def test_every_page_is_small_loads_nothing_and_has_headings_in_order(cases: Path, names: tuple[str, ...]) -> None:
    text = render(read_content([cases / name for name in names]))
    page = Page(text)
    assert len(text.encode()) < LARGEST
    assert all(address.startswith(("data:", "#")) for name in ("src", "href") for address in page.having(name))
    assert "@import" not in page.raw["style"] and "url(" not in page.raw["style"]
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    identities = page.having("id")
    assert len(identities) == len(set(identities))
    assert {address[1:] for address in page.having("href") if address.startswith("#")} <= set(identities)
    assert {"main", "nav", "footer", "header"} <= {tag for tag, _ in page.elements}


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(cases: Path) -> None:
    page = page_of(cases / "comparison")
    policy = next(attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes) or ""
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    # The policy forbids style attributes and handlers, so there must be none.
    assert page.having("style") == []
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_the_sentences_of_the_comparison_stand_on_the_page_as_they_were_written(cases: Path) -> None:
    page = page_of(cases / "comparison")
    found = json.loads((cases / "comparison" / "results.json").read_text())["comparisons"]
    assert len(found) == len(METHODS) - 1
    assert all(one["sentence"] in page.text for one in found)


def test_a_method_is_called_faster_only_where_the_verdict_says_so(cases: Path, tmp_path: Path) -> None:
    results = json.loads((cases / "comparison" / "results.json").read_text())
    for one in results["comparisons"]:
        one |= {"verdict": "no difference shown", "sentence": "No difference shown."}
    write_json(tmp_path / "results.json", results)
    classes = page_of(tmp_path).having("class")
    assert "verdict open" in classes and "verdict faster" not in classes
    assert "verdict faster" in page_of(cases / "comparison").having("class")


def test_the_numbers_of_a_chart_are_those_of_the_file(cases: Path) -> None:
    page = page_of(cases / "comparison")
    chart = next(chart for chart in page.data["charts"] if chart["key"] == "c0-validation")
    arms = json.loads((cases / "comparison" / "results.json").read_text())["arms"]
    for series, arm in zip(chart["views"][0]["series"], arms, strict=True):
        curve = arm["loss_curve"]
        assert series["name"] == arm["label"]
        assert series["points"] == [list(pair) for pair in zip(curve["steps"], map(six, curve["mean"]), strict=True)]
        assert [row[1:] for row in series["band"]] == [
            [six(low), six(high)] for low, high in zip(curve["low"], curve["high"], strict=True)
        ]
        assert len(series["members"]) == len(arm["runs"])


def six(value: float) -> float:
    return float(f"{value:.6g}")


def test_without_a_mean_the_single_runs_stand_for_themselves(cases: Path, tmp_path: Path) -> None:
    results = json.loads((cases / "comparison" / "results.json").read_text())
    curve = results["arms"][0]["loss_curve"]
    for column in ("mean", "low", "high"):
        curve[column] = [None] * len(curve["steps"])
    curve["runs"] = [curve["runs"][0], curve["runs"][1][:3], []]
    write_json(tmp_path / "results.json", results)
    series = page_of(tmp_path).data["charts"][0]["views"][0]["series"][0]
    assert (series["points"], series["band"]) == ([], [])
    assert [len(member["points"]) for member in series["members"]] == [16, 3, 0]


def test_every_chart_has_a_table_with_a_column_for_each_series(cases: Path) -> None:
    page = page_of(cases / "comparison")
    regions = [attributes["aria-label"] for _, attributes in page.elements if attributes.get("role") == "region"]
    titles = [chart["title"] for chart in page.data["charts"]]
    assert len(titles) == 7 and regions[: len(titles)] == titles
    assert all(label in page.text for label in LABELS.values())


def test_a_diverged_run_says_so_and_its_gaps_are_no_numbers(cases: Path) -> None:
    page = page_of(cases / "lost")
    assert "diverged at step 860 of 3,200" in page.text
    assert "Training diverged: after 3 rollbacks, still not finite." in page.text
    assert "1 skipped step: at step 820; the output of mid_block.attn is not finite." in page.text
    assert "1 rollback: from step 826 to 800." in page.text
    (chart,) = (chart for chart in page.data["charts"] if chart["key"] == "r-train")
    assert chart["views"][0]["series"][0]["points"][-1] == [850.0, None]


def test_after_a_rollback_the_later_value_of_a_step_counts(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 6.0},
        {"step": 1, "event": "rollback"},
        {"step": 2, "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (chart,) = page_of(tmp_path).data["charts"]
    assert chart["views"][0]["series"][0]["points"] == [[1.0, 5.0], [2.0, 1.0]]


def test_an_unfinished_run_says_how_far_it_got_and_only_a_live_page_loads_itself_again(cases: Path) -> None:
    page = page_of(cases / "half")
    assert "unfinished: step 1,200 of 3,200" in page.text
    assert page.data["reload"] == 0
    assert page_of(cases / "half", live=True).data["reload"] == RELOAD_SECONDS


def test_events_stand_beside_the_run_and_the_setting_they_happened_in(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "comparison", rates=(0.002, 0.004), seeds=1)
    write_run(folder / "runs" / "cs-lr0.004" / "seed-0", until=800, diverges=True)
    page = page_of(folder)
    assert "CS κ=0.7, lr 0.004, seed 0 1 loss spike: at step 810" in page.text
    assert page.text.count("1 loss spike") == 1 and "Warnings (4)" in page.text


def test_what_diverged_has_no_final_loss_even_if_its_curve_ends_with_a_number(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "comparison", seeds=1)
    with edited(folder / "results.json") as results:
        arm = results["arms"][2]
        arm["loss_curve"]["mean"][-1] = 1.23456e19
        arm["final_loss"] = {"value": None, "low": None, "high": None}
    (row,) = (row for row in numbers_table(read_comparison(folder)).rows if row[0] == "CS κ=0.7")
    assert row[3] == "–"


def test_a_very_wide_interval_leaves_room_for_the_others() -> None:
    wide, narrow = Estimate(1.2, 0.001, 300.0), Estimate(1.5, 1.3, 1.7)
    rows = [Interval(str(place), 0, estimate, "") for place, estimate in enumerate((wide, narrow))]
    scale = IntervalScale.of(Intervals("", "", rows, reference=1.0, log=True))
    assert scale.span(wide) == (0.0, 100.0)
    low, high = scale.span(narrow) or (0.0, 0.0)
    assert high - low > 8


def test_an_unfinished_comparison_warns_that_intervals_will_change(cases: Path) -> None:
    page = page_of(cases / "running")
    assert "unfinished: 6 of 8 runs done" in page.text
    assert "Not all runs have ended: intervals will change." in page.text


def test_a_run_without_advice_names_the_command_that_makes_it(cases: Path) -> None:
    place = cases / "single"
    assert f"scalelong kappa {place}/config.yaml --json > {place}/kappa.json" in page_of(place).text
    found = "κ = 0.61 for CS; the band that matches the target's size is 0.402 to 0.818."
    assert found in page_of(cases / "comparison").text


def test_hostile_names_are_text_wherever_they_come_from(tmp_path: Path) -> None:
    folder = hostile_comparison(tmp_path)
    text = render(read_content([folder, hostile_run(tmp_path)]))
    page = Page(text)
    assert "<img src=x" not in text and "54439" not in text
    assert HOSTILE in page.text
    assert text.count("</script>") == 2
    assert "window.hacked" not in page.raw["script"]
    assert page.data["charts"][0]["views"][0]["series"][0]["name"]
