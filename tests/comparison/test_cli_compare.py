"""`scalelong compare` as users call it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from comparison_cases import TINY, files_in
from typer.testing import CliRunner

from scalelong.cli.commands import app
from scalelong.comparison.folder import save_plan
from scalelong.comparison.plan import make_plan

RATES = [4e-3, 1e3]
ARGUMENTS = ["compare", "digits", "--methods", "none,cs", "--seeds", "1", "--lr", "4e-3,1e3"]
ARGUMENTS += [part for override in (*TINY, "optim.warmup_steps=0") for part in ("--set", override)]
IN_THE_WAY = Path("runs") / "cs-lr0.004" / "seed-0" / "thesis.tex"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A comparison of which one rate diverges, and one run cannot be begun."""
    out = tmp_path_factory.mktemp("made") / "out"
    overrides = [*TINY, "optim.warmup_steps=0"]
    save_plan(out, make_plan("digits", ["none", "cs"], seeds=1, rates=RATES, overrides=overrides), "")
    (out / IN_THE_WAY).parent.mkdir(parents=True)
    (out / IN_THE_WAY).touch()
    command = [sys.executable, "-m", "scalelong", *ARGUMENTS, "--out", str(out), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "COLUMNS": "200"})
    return out, done


def test_a_run_that_fails_is_named_and_the_others_go_on(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = made
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"failed: {IN_THE_WAY.parent}: ") and "holds other files" in line
    assert "1 run failed" in done.stdout and "workers.log" in done.stdout
    statuses = {row["arm"]: row["status"] for row in csv.DictReader((out / "results.csv").open())}
    assert statuses == {
        "none-lr0.004": "finished",
        "cs-lr0.004": "failed",
        "none-lr1000": "diverged",
        "cs-lr1000": "diverged",
    }


def test_the_same_command_makes_only_what_is_missing_and_ends_with_the_table(
    made: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = made
    (out / IN_THE_WAY).unlink()
    before = files_in(out / "runs" / "none-lr0.004")
    again = CliRunner().invoke(app, [*ARGUMENTS, "--out", str(out), "--workers", "1"])
    assert again.exit_code == 0, again.output
    assert files_in(out / "runs" / "none-lr0.004") == before
    results = json.loads((out / "results.json").read_text())
    assert results["status"] == "finished" and results["runs_done"] == 4
    assert "cs-lr0.004 seed 0 finished" in again.output and "1 of 1" in again.output
    (sweep, _) = results["rate_sensitivity"]
    assert sweep["rates"] == RATES and sweep["largest_stable_rate"] == 4e-3
    assert sweep["losses"][1] is None, "a rate at which a run diverged has no mean"
    assert "sensitivity to the learning rate" in again.output and "diverged" in again.output
    assert str(out / "results.json") in again.output
    assert json.loads((out / "kappa.json").read_text())["kappa"] > 0
    curves = list(csv.DictReader((out / "curves.csv").open()))
    assert {row["arm"] for row in curves} == {arm["id"] for arm in results["arms"]}
    assert [row["step"] for row in curves if row["arm"] == "none-lr0.004"] == [str(step) for step in range(1, 11)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "none,nonsense"], "there is no method 'nonsense'"),
        (["--methods", "cs:kappa"], "write options as cs:option=value"),
        (["--seeds", "0"], "a comparison needs at least one seed, got 0"),
        (["--lr", "fast"], "--lr takes numbers with commas between them, not 'fast'"),
        (["--depth", "3"], "model.depth: must be a multiple of 2, got 3"),
        (["--steps", "3"], "leaves 3 points on a curve of 3 steps"),
        (["--set", "data.source=nowhere.parquet", "--dry-run"], "nowhere.parquet"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", "digits", *arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*ARGUMENTS, "--out", str(tmp_path / "out"), "--workers", "1", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "cs-lr1000: CS κ=0.7, lr 1000, depth 4, batch 16" in done.stdout
    assert "4 runs: 4 arms × 1 seed (0), 10 steps each" in done.stdout and "1 worker, about 0:0" in done.stdout
    assert not (tmp_path / "out").exists()
