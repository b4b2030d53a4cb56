"""The page of `scalelong report`, read as text: what it says, what it never says, and that it stands by itself."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_cases import HOSTILE, LABELS, METHODS, draw_grid, write_comparison, write_json, write_run
from typer.testing import CliRunner

from scalelong.cli.commands import app
from scalelong.report import NotAReport, read_content, render, write_page
from scalelong.report.blocks import Interval, Intervals
from scalelong.report.chart_data import chart_data
from scalelong.report.comparison import read_comparison
from scalelong.report.comparison_sections import numbers_table
from scalelong.report.figures import draw_figures
from scalelong.report.intervals import IntervalScale
from scalelong.report.page import RELOAD_SECONDS
from scalelong.report.pictures import Album, Budget
from scalelong.report.read import Estimate, Notes
from scalelong.report.watch import QUIET_POLLS, watch_content

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

LARGEST = 5_000_000


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.raw: dict[str, str] = {}
        self.inside = ""
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in ("script", "style"):
            self.raw[self.inside] = data
            if data.startswith("{"):
                self.raw["data"] = data
        else:
            self.words.append(data)

    def having(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get(name)) is not None]

    @property
    def data(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.raw["data"], parse_constant=refuse)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    write_comparison(folder / "comparison")
    write_comparison(folder / "rates", rates=(0.002, 0.004, 0.008), seeds=1)
    write_comparison(folder / "running", done=False, seeds=2)
    write_run(folder / "single", method="ls", watched=True)
    write_run(folder / "half", until=1200)
    write_run(folder / "lost", until=800, diverges=True)
    return folder


KINDS = [("comparison",), ("rates",), ("running",), ("single",), ("half",), ("lost",)]
KINDS += [("single", "half", "lost"), ("comparison", "rates", "single")]


def page_of(*folders: Path, live: bool = False) -> Page:
    return Page(render(read_content(folders), live=live))


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
    chart = next(chart for chart in page.data["charts"] if chart["key"] == "c0-heldout")
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
    results = json.loads((folder / "results.json").read_text())
    curve = results["arms"][2]["loss_curve"]
    curve["mean"][-1] = 1.23456e19
    results["arms"][2]["final_loss"] = {"value": None, "low": None, "high": None}
    write_json(folder / "results.json", results)
    (row,) = (row for row in numbers_table(read_comparison(folder)).rows if row[0] == "CS κ=0.7")
    assert row[3] == "–"


def test_a_very_wide_interval_leaves_room_for_the_others() -> None:
    wide, narrow = Estimate(1.2, 0.001, 300.0), Estimate(1.5, 1.3, 1.7)
    rows = [Interval(str(place), 0, estimate, "") for place, estimate in enumerate((wide, narrow))]
    scale = IntervalScale.of(Intervals("speedup", "", "", rows, reference=1.0, log=True))
    assert scale.span(wide) == (0.0, 100.0)
    low, high = scale.span(narrow) or (0.0, 0.0)
    assert high - low > 8


def test_an_unfinished_comparison_warns_that_intervals_will_change(cases: Path) -> None:
    page = page_of(cases / "running")
    assert "unfinished: 6 of 8 runs done" in page.text
    assert "Not all runs have ended: intervals will change." in page.text


def test_a_run_without_advice_names_the_command_that_makes_it(cases: Path, tmp_path: Path) -> None:
    place = cases / "single"
    assert f"scalelong kappa {place}/config.yaml --json > {place}/kappa.json" in page_of(place).text
    assert (
        "κ = 0.61 for CS; the band that matches the target's size is 0.402 to 0.818."
        in page_of(cases / "comparison").text
    )


def test_hostile_names_are_text_wherever_they_come_from(tmp_path: Path) -> None:
    folder = hostile_comparison(tmp_path)
    text = render(read_content([folder, hostile_run(tmp_path)]))
    page = Page(text)
    assert "<img src=x" not in text and "54439" not in text
    assert HOSTILE in page.text
    assert text.count("</script>") == 2
    assert "window.hacked" not in page.raw["script"]
    assert page.data["charts"][0]["views"][0]["series"][0]["name"]


def hostile_comparison(folder: Path) -> Path:
    """Every text of a comparison, and the names of its folders, try to become markup."""
    made = write_comparison(folder / "comparison", recipe=HOSTILE, seeds=1)
    results = json.loads((made / "results.json").read_text())
    results |= {"warnings": [HOSTILE], "description": HOSTILE, "command": HOSTILE, "baseline": HOSTILE}
    for arm in results["arms"]:
        arm |= {"id": f"{arm['id']} {HOSTILE}", "label": f"{arm['label']} {HOSTILE}", "setting": HOSTILE}
        arm["runs"][0] |= {"message": HOSTILE, "status": HOSTILE}
    for one in results["comparisons"]:
        one |= {"arm": f"{one['arm']} {HOSTILE}", "sentence": HOSTILE, "verdict": HOSTILE, "setting": HOSTILE}
    write_json(made / "results.json", results)
    write_json(made / "kappa.json", {"kappa": 0.7, "where": HOSTILE, "reasons": [HOSTILE]})
    return made


def hostile_run(folder: Path) -> Path:
    """A slash cannot be part of a folder's name."""
    made = write_run(folder / HOSTILE.replace("/", "⁄"), name=HOSTILE, watched=True)
    with (made / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for event in ("oscillation", "diverged"):
            file.write(json.dumps({"step": 9, "event": event, "message": HOSTILE}) + "\n")
        file.write(json.dumps({"step": 9, "event": "skipped", "origin": HOSTILE}) + "\n")
    return made


# Files that are not as they should be


BROKEN = {"empty": "", "half": '{"arms": [{"id": "c', "other": "[1, 2]", "null": "null", "binary": "\x00\x01 �"}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "metrics.jsonl", "evaluation.json", "kappa.json"])
def test_a_run_with_a_broken_file_still_has_a_page_which_names_it(
    cases: Path, tmp_path: Path, name: str, content: str
) -> None:
    run = shutil.copytree(cases / "half", tmp_path / "run")
    (run / name).write_text(f"{content}\n", encoding="utf-8")
    text = page_of(run).text
    assert "Result" in text and "What was run" in text
    begun = name == "metrics.jsonl" and not content
    assert (f"run/{name}" in text) != begun, "a run that has logged nothing yet is not broken"


@pytest.mark.parametrize("name", ["results.json", "comparison.json", "kappa.json", "runs/cs/seed-0/metrics.jsonl"])
def test_a_broken_file_is_named_on_the_page(cases: Path, tmp_path: Path, name: str) -> None:
    folder = write_comparison(tmp_path / "comparison", seeds=1)
    (folder / name).write_text('{"arms": [{"id": "c\n', encoding="utf-8")
    assert f"{(folder / name).parent.name}/{Path(name).name}" in page_of(folder).text


def test_without_results_the_runs_themselves_are_shown(cases: Path, tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "comparison", seeds=1)
    (folder / "results.json").unlink()
    page = page_of(folder)
    assert "results.json is missing or broken" in page.text
    (chart,) = (chart for chart in page.data["charts"] if chart["key"] == "c0-train")
    assert [series["name"] for series in chart["views"][0]["series"]] == sorted(METHODS)


def keys_in(value: Any) -> Iterator[str]:
    """The names of everything in nested JSON."""
    for item in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from keys_in(item)
    yield from value if isinstance(value, dict) else ()


def replaced(value: Any, key: str, other: Any) -> Any:
    """The same, with another value wherever something is called `key`."""
    if isinstance(value, list):
        return [replaced(item, key, other) for item in value]
    if isinstance(value, dict):
        return {name: other if name == key else replaced(item, key, other) for name, item in value.items()}
    return value


@pytest.mark.parametrize("other", [None, [None, "inf"], {"value": -1, "low": "x", "high": "inf"}], ids=str)
def test_any_key_of_the_results_may_be_missing_or_something_else(cases: Path, tmp_path: Path, other: Any) -> None:
    results = json.loads((cases / "rates" / "results.json").read_text())
    results["arms"] = results["arms"][2:6]
    keys = sorted(set(keys_in(results)))
    assert len(keys) > 60
    for key in keys:
        write_json(tmp_path / "results.json", replaced(results, key, other))
        # All that is done with numbers; the rest of the template only prints.
        content = read_content([tmp_path])
        json.dumps([chart_data(chart) for chart in content.charts], allow_nan=False)
        for plot in content.intervals:
            scale = IntervalScale.of(plot)
            assert all(0 <= place <= 100 for row in plot.rows for place in scale.span(row.estimate) or ()), key
            assert all(0 <= place <= 100 for place, _ in scale.ticks()), key
    write_json(tmp_path / "results.json", dict.fromkeys(results, other))
    assert page_of(tmp_path).data["charts"] == []


def test_a_folder_named_outside_of_the_comparison_is_not_read(cases: Path, tmp_path: Path) -> None:
    secret = write_run(tmp_path / "secret", name="somebody-elses")
    folder = write_comparison(tmp_path / "comparison", seeds=1)
    results = json.loads((folder / "results.json").read_text())
    places = ("../secret", str(secret), "runs/../../secret", "runs/cs/seed-0")
    for arm, place in zip(results["arms"], places, strict=True):
        arm["runs"][0]["folder"] = place
    write_json(folder / "results.json", results)
    page = page_of(folder)
    assert "somebody-elses" not in page.text
    assert page.text.count("names a folder outside of the comparison, which is not read") == 3


def test_an_unreadable_picture_is_left_out_with_a_note(cases: Path, tmp_path: Path) -> None:
    shutil.copytree(cases / "half", tmp_path / "run")
    (tmp_path / "run" / "samples" / "step-000400.png").write_bytes(b"no picture")
    page = page_of(tmp_path / "run")
    assert "samples/step-000400.png could not be shown" in page.text
    assert len([tag for tag, _ in page.elements if tag == "img"]) == 1


# Pictures, figures and the command


def test_a_grid_that_was_enlarged_is_stored_pixel_by_pixel(tmp_path: Path) -> None:
    from PIL import Image

    path = draw_grid(tmp_path / "grid.png", 0, size=73, factor=6)
    picture = Album(Notes()).embed(path, "CS", "")
    assert picture is not None and (picture.width, picture.height) == (73, 73) and picture.pixelated
    stored = Image.open(io.BytesIO(base64.b64decode(picture.source.partition(",")[2])))
    with Image.open(path) as original:
        assert stored.resize(original.size, Image.Resampling.NEAREST).tobytes() == original.tobytes()


def test_many_large_pictures_stay_within_the_size_of_a_page(tmp_path: Path) -> None:
    from PIL import Image

    Image.effect_noise((800, 800), 90).convert("RGB").save(tmp_path / "large.png", compress_level=1)
    notes, budget = Notes(), 400_000
    album = Album(notes, Budget(budget))
    pictures = [album.embed(tmp_path / "large.png", "CS", "") for _ in range(4)]
    kept = [picture for picture in pictures if picture is not None]
    assert 1 <= len(kept) < 4
    # Base64 takes four letters for three bytes.
    assert sum(len(picture.source) for picture in kept) <= budget * 4 / 3 + 100 * len(kept)
    assert "left out" in notes.lines[0]


def test_the_pictures_of_all_comparisons_and_runs_of_a_page_share_its_size(
    cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 30_000  # Five of the grids that were drawn here.
    monkeypatch.setattr("scalelong.report.page.Budget", lambda: Budget(budget))
    page = page_of(cases / "comparison", cases / "rates", cases / "single")
    pictures = [source for source in page.having("src") if source.startswith("data:image")]
    assert pictures and sum(len(source) for source in pictures) <= budget * 4 / 3 + 100 * len(pictures)
    assert "and later pictures are left out" in page.text


def test_settings_whose_samples_are_not_shown_are_named(tmp_path: Path) -> None:
    rates = (0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007)
    page = page_of(write_comparison(tmp_path / "comparison", rates=rates, seeds=1))
    assert "Drawn images, lr 0.006" in page.text and "Drawn images, lr 0.007" not in page.text
    assert "Not shown, to keep the page small: the samples of lr 0.007, which lie in their folders." in page.text


def test_every_figure_is_drawn_as_png_and_svg_and_names_stay_text(tmp_path: Path) -> None:
    folder = hostile_comparison(tmp_path)
    content = read_content([folder])
    written = draw_figures(content, tmp_path / "figures")
    views = sum(len(chart.views) for chart in content.charts) + sum(not plot.empty for plot in content.intervals)
    assert len(written) == 2 * views > 10
    assert {"heldout.png", "heldout.svg", "speedup-0.png"} <= {path.name for path in written}
    assert all(path.stat().st_size > 1000 for path in written)
    assert not any("<img" in path.read_text(encoding="utf-8") for path in written if path.suffix == ".svg")


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)], prog_name="scalelong")


def test_the_command_writes_into_the_folder_or_where_it_is_told(cases: Path, tmp_path: Path) -> None:
    shutil.copytree(cases / "half", tmp_path / "half")
    assert run(tmp_path / "half").stdout == f"page: {tmp_path / 'half' / 'report.html'}\n"
    result = run(cases / "half", cases / "lost", "--out", tmp_path / "new" / "two.html")
    assert result.exit_code == 0 and (tmp_path / "new" / "two.html").read_text(encoding="utf-8").startswith("<!doctype")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp")]


@pytest.mark.parametrize("place", ["", "nowhere", "file"])
def test_a_folder_that_is_neither_run_nor_comparison_ends_with_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    result = run(tmp_path / place)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1 and result.stderr.startswith(f"error: {tmp_path / place}")
    with pytest.raises(NotAReport):
        read_content([tmp_path / place])


def test_half_a_pair_of_surrogates_does_not_stop_the_page(cases: Path, tmp_path: Path) -> None:
    run = shutil.copytree(cases / "single", tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "event": "diverged", "message": "A\\ud800b"}\n')
    write_page(read_content([run]), tmp_path / "page.html")
    assert "A?b" in (tmp_path / "page.html").read_text()


def test_one_diverged_run_does_not_end_a_watch_while_others_train(cases: Path) -> None:
    assert not read_content([cases / "lost", cases / "half"]).finished
    assert read_content([cases / "lost"]).finished


def test_a_run_ends_with_its_last_evaluation(cases: Path, tmp_path: Path) -> None:
    run = shutil.copytree(cases / "single", tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "evaluation": {"every": 10}}))
    (run / "evaluation.json").write_text(json.dumps([{"step": 10, "figures": {}}]))
    assert not read_content([run]).finished
    (run / "evaluation.json").write_text(json.dumps([{"step": config["training"]["steps"], "figures": {}}]))
    assert read_content([run]).finished


def test_a_run_that_was_trained_without_an_evaluator_ends_with_its_last_step(cases: Path, tmp_path: Path) -> None:
    run = shutil.copytree(cases / "single", tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "evaluation": {"every": 10}}))
    assert read_content([run]).finished


def test_the_time_of_a_run_is_that_of_all_its_starts(cases: Path, tmp_path: Path) -> None:
    run = shutil.copytree(cases / "half", tmp_path / "run")
    write_json(run / "environment.json", [{"step": 0}, {"step": 500}])
    lines = [{"step": 500, "seconds": 60.0}, {"step": 550, "seconds": 70.0}, {"step": 600, "seconds": 90.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run)
    assert page.text.count("2 min 30 s") == 2, "in the table, and among the facts"


def coefficients_on(page: Page) -> list[Any]:
    (chart,) = (chart for chart in page.data["charts"] if chart["key"] == "r-coef")
    return [series["points"] for series in chart["views"][0]["series"]]


def test_the_coefficients_are_those_of_the_last_reading_whatever_happened_after_it(cases: Path, tmp_path: Path) -> None:
    run = shutil.copytree(cases / "single", tmp_path / "run")
    event = {"step": 3200, "event": "oscillation", "skip": 2, "message": "training oscillates"}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert coefficients_on(page_of(run)) == coefficients_on(page_of(cases / "single"))


def test_watching_reads_again_after_a_change_and_ends_with_the_run(tmp_path: Path) -> None:
    folder, seen = write_run(tmp_path / "run", until=800), []

    def wait(_: float) -> None:
        seen.append("waited")
        if len(seen) == 2:
            write_run(folder)

    found = [content.parts[0].status for content in watch_content([folder], wait)]
    assert found == ["unfinished: step 800 of 3,200", "finished at step 3,200"]
    assert len(seen) == 2 + QUIET_POLLS + 1


def test_an_interrupted_watch_leaves_a_page_that_stands_still(
    cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, seen = tmp_path / "page.html", []

    def watch(sources: list[Path]) -> Iterator[Any]:
        yield read_content(sources)
        seen.append(Page(page.read_text(encoding="utf-8")).data["reload"])
        raise KeyboardInterrupt

    monkeypatch.setattr("scalelong.report.watch.watch_content", watch)
    result = run(cases / "half", "--watch", "--out", page)
    assert result.exit_code == 0 and result.stdout.endswith(f"page: {page}\n")
    assert seen == [RELOAD_SECONDS]
    assert Page(page.read_text(encoding="utf-8")).data["reload"] == 0
