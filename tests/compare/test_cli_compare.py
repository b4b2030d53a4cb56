"""`scalelong compare` as users call it; stopped at any moment and resumed, it gives the same tables."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_fails, run
from comparison_cases import TINY, files_in, lasting
from killed_comparisons import OBSTACLE

from scalelong.cli.compare import report
from scalelong.cli.compare_display import print_results
from scalelong.compare.run import CompareResult
from scalelong.report import read_content, render
from scalelong.report.comparison import read_comparison
from scalelong.report.comparison_page import numbers_table

PROGRAM = Path(__file__).with_name("killed_comparisons.py")
RATES = [4e-3, 1.0]
ARGUMENTS = ["compare", "digits", "--methods", "none,cs", "--seeds", "1", "--lr", "4e-3,1"]
# A checkpoint takes as long as all else of so small a step; what is stopped between two of them does some steps again.
OVERRIDES = (*TINY, "optim.warmup_steps=0", "training.checkpoint_every=4")
ARGUMENTS += [part for override in OVERRIDES for part in ("--set", override)]

# Threads that wait for each other take forever where other tests want the cores too.
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
WORKERS = ["--workers", "2"]
ENDS = {"failed": ["fails"], "troubled": ["SIGKILL", "SIGTERM", "everyone", "worker", "told"]}
Made = tuple[Path, str]


def in_processes(folder: Path, arguments: list[str], ends: dict[str, list[str]]) -> Path:
    content = json.dumps({"arguments": arguments, "folder": str(folder), "ends": ends})
    done = subprocess.run(
        [sys.executable, str(PROGRAM), content], capture_output=True, text=True, timeout=600, env=ENVIRONMENT
    )
    logs = [path.read_text() for path in folder.glob("*/out/logs/*")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    return folder


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that was left alone, of two rates one of which fails; one with a run that broke; one often stopped."""
    return in_processes(tmp_path_factory.mktemp("comparisons"), [*ARGUMENTS, *WORKERS], ENDS)


@pytest.fixture(scope="module")
def made(comparisons: Path) -> Made:
    """The one that was left alone, and what it printed."""
    assert (comparisons / "whole" / "stderr").read_text() == ""
    return comparisons / "whole" / "out", (comparisons / "whole" / "stdout").read_text()


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def tables(place: Path) -> dict[str, Any]:
    results = json.loads((place / "out" / "results.json").read_text().replace(str(place), "the same"))
    assert results["status"] == "finished" and results["runs_done"] == results["runs_total"]
    return lasting(results)


def test_killed_told_to_stop_and_without_a_worker_it_gives_the_same_tables(comparisons: Path) -> None:
    assert tables(comparisons / "troubled") == tables(comparisons / "whole")


def test_a_run_that_breaks_is_named_the_others_continue_and_it_is_tried_again(comparisons: Path) -> None:
    results = json.loads((comparisons / "failed" / "results-with-failure.json").read_text())
    runs = {run["folder"]: run for arm in results["arms"] for run in arm["runs"]}
    failed = runs.pop(str(Path(OBSTACLE).parent))
    assert failed["status"] == "broken" and "holds other files" in failed["message"]
    assert {run["status"] for run in runs.values()} == {"finished", "failed"}
    assert results["status"] == "incomplete" and results["runs_done"] == 3
    pairs = [pair["pairs"] for pair in results["comparisons"]]
    assert pairs == [0, 1], "a seed without its partner is no pair"
    assert tables(comparisons / "failed") == tables(comparisons / "whole")


@pytest.mark.slow
def test_killed_ten_times_at_random_it_gives_the_same_tables(tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, *WORKERS, "--methods", "none,cs,ls", "--seeds", "2", "--set", "training.steps=40"]
    folder = in_processes(tmp_path, arguments, {"killed": ["SIGKILL"] * 10})
    assert tables(folder / "killed") == tables(folder / "whole")


def test_a_run_that_fails_is_a_result(made: Made) -> None:
    out, _ = made
    assert {row["arm"]: row["status"] for row in rows_of(out / "results.csv")} == {
        "none-lr0.004": "finished",
        "cs-lr0.004": "finished",
        "none-lr1": "failed",
        "cs-lr1": "failed",
    }
    text = (out / "results.json").read_text()
    results = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert results["status"] == "finished" and results["runs_done"] == 4
    sweep = results["rate_sensitivity"][0]
    assert sweep["rates"] == RATES and sweep["largest_stable_rate"] == 4e-3
    assert sweep["losses"][1] is None, "a rate at which a run failed has no mean"


def test_it_ends_with_the_tables_and_where_they_are(made: Made) -> None:
    out, printed = made
    assert "cs-lr0.004 seed 0 finished, validation loss" in printed
    assert "sensitivity to the learning rate" in printed
    for name in ("results.json", "results.csv", "curves.csv"):
        assert str(out / name) in printed
    assert json.loads((out / "kappa.json").read_text())["kappa"] > 0
    curves = rows_of(out / "curves.csv")
    assert [row["step"] for row in curves if row["arm"] == "none-lr0.004"] == [str(step) for step in range(1, 11)]


def test_the_same_command_on_a_finished_comparison_changes_no_run(made: Made) -> None:
    out, printed = made
    before = files_in(out / "runs")
    again = run(*ARGUMENTS, *WORKERS, "--out", out, COLUMNS="200")
    assert again.exit_code == 0, again.output
    assert files_in(out / "runs") == before
    told, said = (text[text.index("digits, lr 0.004") :] for text in (printed, again.stdout))
    assert said.split() == told.split(), "the tables are made of the folders alone"


def test_its_page_shows_what_it_wrote(made: Made) -> None:
    pytest.importorskip("jinja2")
    results = json.loads((made[0] / "results.json").read_text())
    text = " ".join(unescape(render(read_content([made[0]]))).split())
    assert all(pair["sentence"] in text and pair["sentence_seconds"] in text for pair in results["comparisons"])
    assert all(warning in text for warning in results["warnings"]), "of the runs that failed"
    for row, arm in zip(numbers_table(read_comparison(made[0])).rows, results["arms"], strict=True):
        loss = arm["final_loss"]["value"]
        assert row[0] == f"{arm['label']}, lr {arm['lr']:g}"
        assert row[3] == ("–" if loss is None else f"{loss:.4f}")
        assert row[-1] == f"{results['parameters'][arm['id']]:,}"
    assert sum(row[2].startswith("1 of 1") for row in numbers_table(read_comparison(made[0])).rows) == 2


def test_the_exit_code_tells_of_failures_and_signals(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads((made[0] / "results.json").read_text())
    with pytest.raises(SystemExit) as failed:
        report(
            CompareResult(made[0], results, None, {"runs/cs/seed-1": "no space left"}),
            "scalelong compare digits",
            print_results,
        )
    said = capsys.readouterr()
    assert failed.value.code == 1 and said.err == "broken: runs/cs/seed-1: no space left\n"
    with pytest.raises(SystemExit) as stopped:
        report(CompareResult(made[0], results, signal.SIGTERM, {}), "scalelong compare digits", print_results)
    assert stopped.value.code == 143
    assert "stopped and saved: 4 of 4 runs done. To resume: scalelong compare digits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "none,nonsense"], "there is no method 'nonsense'"),
        (["--methods", "cs:kappa"], "write options as cs:option=value"),
        (["--seeds", "0"], "a comparison needs at least one seed, got 0"),
        (["--lr", "fast"], "--lr takes numbers with commas between them, not 'fast'"),
        (["--depth", "3"], "model.depth: must be a multiple of 2, got 3"),
        (["--steps", "3"], "leaves 3 points on a curve of 3 steps"),
        (["--set", "data.source=nowhere.parquet"], "nowhere.parquet"),
        (["--set", "evaluation.every=9", "--set", "evaluation.network=none.pt"], "there is no file 'none.pt'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert_fails(run("compare", "digits", *arguments, "--out", tmp_path / "out"), re.escape(message))
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    done = run(*ARGUMENTS, "--out", tmp_path / "out", "--workers", 1, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "cs-lr1: CS κ=0.7, lr 1, depth 4, batch 16" in done.stdout
    assert "4 runs: 4 arms × 1 seed (0), 10 steps each" in done.stdout and "1 worker, about 0:" in done.stdout
    assert not (tmp_path / "out").exists()
