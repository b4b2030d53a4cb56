"""Damaged or changed files of a comparison: each is named, and nothing is concluded from what is left of it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from comparison_cases import tiny_plan

from scalelong.compare import outcome
from scalelong.compare.grid import FILE, PlanError, check_plan, save_plan
from scalelong.compare.outcome import read_outcome
from scalelong.compare.run import Display, Launcher

PLAN = tiny_plan("cs", seeds=1)
RUN = PLAN.runs[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    save_plan(out, PLAN, "the command")
    outcome.train_and_measure(out / RUN.folder, RUN.config)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "comparison")


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_a_comparison_that_was_not_changed_is_extended(out: Path) -> None:
    check_plan(out, tiny_plan("cs", "uniform", seeds=2))


@pytest.mark.parametrize("content", ["[1]", "", "{", "{}", '{"arms": [1]}', "[" * 100_000])
def test_a_damaged_comparison_json_is_named(out: Path, content: str) -> None:
    (out / FILE).write_text(content)
    with pytest.raises(PlanError, match=r"comparison\.json does not say what is compared.*put it back"):
        check_plan(out, PLAN)


@pytest.mark.parametrize(("old", "new"), [('"lr": 0.004', '"lr": 0.002'), ('"command": "the', '"command": "a')])
def test_a_changed_comparison_json_is_refused_whatever_was_changed(out: Path, old: str, new: str) -> None:
    change(out / FILE, old, new)
    with pytest.raises(PlanError, match=r"comparison\.json does not match its checksum"):
        check_plan(out, PLAN)


def test_a_comparison_json_of_before_has_no_checksum_and_is_compared_by_its_settings(out: Path) -> None:
    content = json.loads((out / FILE).read_text())
    del content["sha256"]
    (out / FILE).write_text(json.dumps(content))
    check_plan(out, PLAN)
    del content["arms"][0]["config"]["sampling"]["variance"]  # As before there was such a key.
    (out / FILE).write_text(json.dumps(content))
    check_plan(out, PLAN)
    content["arms"][0]["config"]["optim"]["lr"] = 1.0
    (out / FILE).write_text(json.dumps(content))
    with pytest.raises(PlanError, match=r"other settings of cs \(optim\.lr 1\.0 → 0\.004\)"):
        check_plan(out, PLAN)


@pytest.mark.parametrize(
    ("old", "new"), [("{", "x"), ('"finished"', '"failed"'), ('"noise_losses"', '"noise"'), ('"step": 10', '"step": 9')]
)
def test_a_damaged_outcome_is_named_and_measured_again(
    out: Path, caplog: pytest.LogCaptureFixture, old: str, new: str
) -> None:
    file = out / RUN.folder / outcome.FILE
    whole = file.read_bytes()
    change(file, old, new)
    with caplog.at_level(logging.WARNING):
        assert read_outcome(file.parent) is None
    assert f"{file} is damaged" in caplog.text
    outcome.train_and_measure(file.parent, RUN.config)
    assert file.read_bytes() == whole


def open_launcher(out: Path) -> Launcher:
    return Launcher(PLAN, out, 1, Display(), "the same", "now")


def test_a_run_with_a_whole_log_counts(out: Path) -> None:
    launcher = open_launcher(out)
    assert not launcher.failures
    assert launcher.progress.states[str(RUN.folder)].status == "finished"


@pytest.mark.parametrize("content", [lambda text: text[: len(text) // 2], lambda text: text.replace("1", "2"), None])
def test_a_run_whose_log_is_damaged_is_named_and_counts_for_nothing(out: Path, content) -> None:
    log = out / RUN.folder / "metrics.jsonl"
    log.unlink() if content is None else log.write_text(content(log.read_text()))
    launcher = open_launcher(out)
    (message,) = launcher.failures.values()
    assert "metrics.jsonl is not as the checkpoint of step 10 left it" in message
    assert message.endswith(f"Remove {out / RUN.folder} to make the run again")
    assert launcher.progress.states[str(RUN.folder)].status == "broken"
    assert not launcher.records[str(RUN.folder)].survived
    assert [job.path.name for job in launcher.jobs] == ["kappa.json"], "it is not trained over what is there"
    results = launcher.write()
    assert results["runs_done"] == 0 or results["failures"]
