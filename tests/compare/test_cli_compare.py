"""`scalelong compare` as users call it."""

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

import pytest
from command_line import assert_fails, run
from comparison_cases import TINY, files_in

from scalelong.cli.compare import report
from scalelong.compare.run import CompareResult
from scalelong.report import read_content, render
from scalelong.report.comparison import read_comparison
from scalelong.report.comparison_page import numbers_table

RATES = [4e-3, 1.0]
ARGUMENTS = ["compare", "digits", "--methods", "none,cs", "--seeds", "1", "--lr", "4e-3,1"]
ARGUMENTS += [part for override in (*TINY, "optim.warmup_steps=0") for part in ("--set", override)]

# Threads that wait for each other take forever where other tests want the cores too.
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
Made = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A comparison of two rates, one of which diverges."""
    out = tmp_path_factory.mktemp("made") / "out"
    command = [sys.executable, "-m", "scalelong", *ARGUMENTS, "--out", str(out), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def test_a_run_that_diverges_is_a_result(made: Made) -> None:
    out, done = made
    assert {row["arm"]: row["status"] for row in rows_of(out / "results.csv")} == {
        "none-lr0.004": "finished",
        "cs-lr0.004": "finished",
        "none-lr1": "diverged",
        "cs-lr1": "diverged",
    }
    text = (out / "results.json").read_text()
    results = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert results["status"] == "finished" and results["runs_done"] == 4
    sweep = results["rate_sensitivity"][0]
    assert sweep["rates"] == RATES and sweep["largest_stable_rate"] == 4e-3
    assert sweep["losses"][1] is None, "a rate at which a run diverged has no mean"
    assert done.stderr == ""


def test_it_ends_with_the_tables_and_where_they_are(made: Made) -> None:
    out, done = made
    assert "cs-lr0.004 seed 0 finished, validation loss" in done.stdout
    assert "sensitivity to the learning rate" in done.stdout
    for name in ("results.json", "results.csv", "curves.csv"):
        assert str(out / name) in done.stdout
    assert json.loads((out / "kappa.json").read_text())["kappa"] > 0
    curves = rows_of(out / "curves.csv")
    assert [row["step"] for row in curves if row["arm"] == "none-lr0.004"] == [str(step) for step in range(1, 11)]


def test_the_same_command_on_a_finished_comparison_changes_no_run(made: Made) -> None:
    out, done = made
    before = files_in(out / "runs")
    again = run(*ARGUMENTS, "--out", out, "--workers", 1, COLUMNS="200")
    assert again.exit_code == 0, again.output
    assert files_in(out / "runs") == before
    told, said = (text[text.index("digits, lr 0.004") :] for text in (done.stdout, again.stdout))
    assert said.split() == told.split(), "the tables are made of the folders alone"


def test_its_page_shows_what_it_wrote(made: Made) -> None:
    pytest.importorskip("jinja2")
    results = json.loads((made[0] / "results.json").read_text())
    text = " ".join(unescape(render(read_content([made[0]]))).split())
    assert all(pair["sentence"] in text and pair["sentence_seconds"] in text for pair in results["comparisons"])
    assert all(warning in text for warning in results["warnings"]), "of the runs that diverged"
    for row, arm in zip(numbers_table(read_comparison(made[0])).rows, results["arms"], strict=True):
        loss = arm["final_loss"]["value"]
        assert row[0] == f"{arm['label']}, lr {arm['lr']:g}"
        assert row[3] == ("–" if loss is None else f"{loss:.4f}")
        assert row[-1] == f"{results['parameters'][arm['id']]:,}"
    assert sum(row[2].startswith("1 of 1") for row in numbers_table(read_comparison(made[0])).rows) == 2


def test_the_exit_code_tells_of_failures_and_signals(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads((made[0] / "results.json").read_text())
    with pytest.raises(SystemExit) as failed:
        report(CompareResult(made[0], results, None, {"runs/cs/seed-1": "no space left"}), "scalelong compare digits")
    said = capsys.readouterr()
    assert failed.value.code == 1 and said.err == "failed: runs/cs/seed-1: no space left\n"
    with pytest.raises(SystemExit) as stopped:
        report(CompareResult(made[0], results, signal.SIGTERM, {}), "scalelong compare digits")
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
