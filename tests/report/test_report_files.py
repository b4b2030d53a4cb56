"""What the page makes of broken files, of pictures and of runs that go on, and how the command writes it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_cases import METHODS, draw_grid, edited, write_comparison, write_json, write_run
from report_page import Page, hostile_comparison, page_of
from typer.testing import CliRunner

from scalelong.cli.app import app
from scalelong.report import Content, NotAReport, read_content, write_page
from scalelong.report.blocks import IntervalScale, Text, chart_data
from scalelong.report.figures import draw_figures
from scalelong.report.page import QUIET_POLLS, RELOAD_SECONDS, watch_content
from scalelong.report.sections import BUDGET, Album

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


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
        assert content.charts or f"{tmp_path.name}/results.json holds something else" in warnings_of(content), key
        json.dumps([chart_data(chart) for chart in content.charts], allow_nan=False)
        for plot in content.intervals:
            scale = IntervalScale.of(plot)
            assert all(0 <= place <= 100 for row in plot.rows for place in scale.span(row.estimate) or ()), key
            assert all(0 <= place <= 100 for place, _ in scale.ticks()), key
    write_json(tmp_path / "results.json", dict.fromkeys(results, other))
    assert page_of(tmp_path).data["charts"] == []


def warnings_of(content: Content) -> str:
    texts = [block for part in content.parts for block in part.blocks if isinstance(block, Text)]
    return " ".join(line for text in texts if text.tone == "warning" for line in text.lines)


def test_a_value_that_is_something_else_is_named_with_its_place(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "comparison", seeds=1)
    with edited(folder / "results.json") as results:
        results["arms"][1]["loss_curve"]["steps"][3] = "soon"
    page = page_of(folder)
    assert "results.json holds something else than what is written there (at arms.1.loss_curve.steps.3)." in page.text
    assert "results.json is missing or broken: only the plan and the runs themselves are shown." in page.text


def test_a_folder_named_outside_of_the_comparison_is_not_read(cases: Path, tmp_path: Path) -> None:
    secret = write_run(tmp_path / "secret", name="somebody-elses")
    folder = write_comparison(tmp_path / "comparison", seeds=1)
    places = ("../secret", str(secret), "runs/../../secret", "runs/cs/seed-0")
    with edited(folder / "results.json") as results:
        for arm, place in zip(results["arms"], places, strict=True):
            arm["runs"][0]["folder"] = place
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
    picture = Album(BUDGET).embed(path, "CS", "", [])
    assert picture is not None and (picture.width, picture.height) == (73, 73) and picture.pixelated
    stored = Image.open(io.BytesIO(base64.b64decode(picture.source.partition(",")[2])))
    with Image.open(path) as original:
        assert stored.resize(original.size, Image.Resampling.NEAREST).tobytes() == original.tobytes()


def test_many_large_pictures_stay_within_the_size_of_a_page(tmp_path: Path) -> None:
    from PIL import Image

    Image.effect_noise((800, 800), 90).convert("RGB").save(tmp_path / "large.png", compress_level=1)
    warnings: list[str] = []
    budget = 400_000
    album = Album(budget)
    pictures = [album.embed(tmp_path / "large.png", "CS", "", warnings) for _ in range(4)]
    kept = [picture for picture in pictures if picture is not None]
    assert 1 <= len(kept) < 4
    # Base64 takes four letters for three bytes.
    assert sum(len(picture.source) for picture in kept) <= budget * 4 / 3 + 100 * len(kept)
    assert "left out" in warnings[0]


def test_the_pictures_of_all_comparisons_and_runs_of_a_page_share_its_size(
    cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 30_000  # Five of the grids that were drawn here.
    monkeypatch.setattr("scalelong.report.sections.BUDGET", budget)
    page = page_of(cases / "comparison", cases / "rates", cases / "single")
    pictures = [source for source in page.having("src") if source.startswith("data:image")]
    assert pictures and sum(len(source) for source in pictures) <= budget * 4 / 3 + 100 * len(pictures)
    assert "and later pictures are left out" in page.text


def test_settings_whose_samples_are_not_shown_are_named(tmp_path: Path) -> None:
    rates = (0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007)
    page = page_of(write_comparison(tmp_path / "comparison", rates=rates, seeds=1))
    assert "Samples, lr 0.006" in page.text and "Samples, lr 0.007" not in page.text
    assert "Not shown, to keep the page small: the samples of lr 0.007, which lie in their folders." in page.text


def test_every_figure_is_drawn_as_png_and_svg_and_names_stay_text(tmp_path: Path) -> None:
    folder = hostile_comparison(tmp_path)
    content = read_content([folder])
    written = draw_figures(content, tmp_path / "figures")
    views = sum(len(chart.views) for chart in content.charts) + sum(bool(plot.values) for plot in content.intervals)
    assert len(written) == 2 * views > 10
    assert {"validation.png", "validation.svg", "speedup-0.png"} <= {path.name for path in written}
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


def test_a_run_ends_with_its_last_evaluation_or_its_last_step_without_an_evaluator(cases: Path, tmp_path: Path) -> None:
    run = shutil.copytree(cases / "single", tmp_path / "run")
    with edited(run / "config.yaml") as config:
        config["evaluation"] = {"every": 10}
    assert read_content([run]).finished, "none was evaluated: it was trained without an evaluator"
    write_json(run / "evaluation.json", [{"step": 10, "figures": {}}])
    assert not read_content([run]).finished
    write_json(run / "evaluation.json", [{"step": config["training"]["steps"], "figures": {}}])
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

    monkeypatch.setattr("scalelong.report.page.watch_content", watch)
    result = run(cases / "half", "--watch", "--out", page)
    assert result.exit_code == 0 and result.stdout.endswith(f"page: {page}\n")
    assert seen == [RELOAD_SECONDS]
    assert Page(page.read_text(encoding="utf-8")).data["reload"] == 0


def test_lines_that_a_log_has_lost_are_among_the_warnings(cases: Path, tmp_path: Path) -> None:
    run = shutil.copytree(cases / "half", tmp_path / "run")
    log = run / "metrics.jsonl"
    content = log.read_bytes()
    lines, step = content.count(b"\n"), max(json.loads(line)["step"] for line in content.splitlines())
    said = {"step": step, "metrics_size": len(content), "metrics_lines": lines}
    said |= {"metrics_sha256": hashlib.sha256(content).hexdigest()}
    write_json(run / "checkpoints" / f"step-{step:06d}" / "state.json", said)
    assert "metrics.jsonl is not as" not in page_of(run).text

    log.write_bytes(b"".join(content.splitlines(keepends=True)[:4]))
    assert f"{lines - 4} of {lines} lines up to step {step} are lost" in page_of(run).text
    with log.open("a") as file:
        file.write(json.dumps({"step": 2, "event": "log damaged", "message": "3 of 5 lines are lost"}) + "\n")
    assert "run/metrics.jsonl: 3 of 5 lines are lost." in page_of(run).text


LAUGHS = "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{k}: &a{k} {{x: *a{k - 1}, y: *a{k - 1}}}\n" for k in range(1, 60))


@pytest.mark.parametrize(
    "content", [LAUGHS, "a: &a {b: *a}", "{a: " * 3000, "[" * 3000], ids=["laughs", "itself", "a", "["]
)
def test_a_recipe_that_stands_for_more_than_a_recipe_becomes_a_warning(
    cases: Path, tmp_path: Path, content: str
) -> None:
    run = shutil.copytree(cases / "half", tmp_path / "run")
    (run / "config.yaml").write_text(content)
    assert "run/config.yaml is broken or half-written" in page_of(run).text
