"""Settings and log of a run are bound to its checkpoints: what was changed or lost since is never its own."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from run_cases import lasting_metrics, run_tiny, tiny

from scalelong.config import to_yaml
from scalelong.runs import CheckpointStore, Run, RunError
from scalelong.runs.model import choose_checkpoint
from scalelong.sampling import sample_run
from scalelong.training import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run_tiny(out)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def edit(out: Path, old: str, new: str) -> Run:
    run = Run(out)
    text = run.config_file.read_text()
    assert old in text
    run.config_file.write_text(text.replace(old, new))
    return run


CHANGED = r"config\.yaml is not what the run was trained with \(optim\.lr 0\.004 → 0\.002\): put it back"


def test_a_changed_config_yaml_is_refused_with_what_differs(out: Path) -> None:
    run = edit(out, "lr: 0.004", "lr: 0.002")
    with pytest.raises(RunError, match=CHANGED):
        train(run.config().model_copy(update={"training": tiny("training.steps=12").training}), out)


@pytest.mark.parametrize("command", [lambda out: sample_run(out, 1), lambda out: choose_checkpoint(Run(out), "8")])
def test_nothing_is_made_of_a_checkpoint_with_a_changed_config_yaml(out: Path, command) -> None:
    edit(out, "lr: 0.004", "lr: 0.002")
    with pytest.raises(RunError, match=CHANGED):
        command(out)


@pytest.mark.parametrize("content", ["", "optim: {", None])
def test_the_same_recipe_resumes_a_run_whose_config_yaml_is_damaged_and_writes_it_again(
    out: Path, content: str | None
) -> None:
    run = edit(out, "lr: 0.004", "lr: 0.002")
    if content is not None:
        run.config_file.write_text(content)
    run_tiny(out, "training.steps=9")
    assert run.config() == tiny("training.steps=9")


def test_what_no_step_depends_on_may_be_changed_in_config_yaml(out: Path) -> None:
    run = edit(out, "steps: 8\n", "steps: 9\n")
    assert train(run.config(), out).step == 9


def test_a_checkpoint_of_before_is_compared_with_config_yaml(out: Path) -> None:
    forget(out, "recipe")
    run = edit(out, "lr: 0.004", "lr: 0.002")
    with pytest.raises(RunError, match=r"other settings \(optim\.lr 0\.002 → 0\.004\)"):
        run_tiny(out, "training.steps=9")
    assert train(run.config(), out).step == 8


def forget(out: Path, *keys: str) -> None:
    """Leave keys out of the last checkpoint, as older versions did."""
    last = Run(out).checkpoints().latest()
    assert last is not None
    state = {key: value for key, value in last.state().items() if key not in keys}
    tensors = {group: last.tensors(group) for group in last.groups}
    CheckpointStore(last.path.parent).save(last.step, tensors, state, last.metric)


DAMAGES = {
    "cut": (lambda lines: lines[:3], r"5 of 8 lines up to step 8 are lost"),
    "cut in a line": (lambda lines: [*lines[:3], lines[3][:7]], r"5 of 8 lines up to step 8 are lost"),
    "lines in the middle": (lambda lines: lines[:2] + lines[4:], r"2 of 8 lines up to step 8 are lost"),
    "a number": (lambda lines: [lines[0].replace('"loss": ', '"loss": 9'), *lines[1:]], r"lines have changed"),
    "a broken line": (lambda lines: [lines[0].replace("{", "x"), *lines[1:]], r"1 of 8 lines up to step 8 are lost"),
    "all": (lambda lines: None, r"8 of 8 lines up to step 8 are lost"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_log_is_said_and_marked_where_the_run_resumes(
    out: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, (change, lost) = Run(out).metrics.path, DAMAGES[damage]
    before = path.read_text()
    lines = change(before.splitlines(keepends=True))
    path.unlink() if lines is None else path.write_text("".join(lines))
    assert (path.read_text() if path.exists() else "") != before
    with caplog.at_level(logging.WARNING):
        assert run_tiny(out).finished
    assert f"metrics.jsonl is not as the checkpoint of step 8 left it: {lost}" in caplog.text

    run_tiny(out, "training.steps=9")
    *kept, mark, last = lasting_metrics(out)
    assert mark["event"] == "log damaged"
    assert lost in mark["message"]
    assert last["step"] == 9
    assert all(line["step"] <= 8 for line in kept)
    caplog.clear()
    run_tiny(out, "training.steps=9")
    assert not caplog.text


def test_a_whole_log_is_not_said_to_be_damaged(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_tiny(out)
        run_tiny(out, "training.steps=9")
    assert not caplog.text
    assert [line["step"] for line in lasting_metrics(out)] == list(range(1, 10))


def test_a_checkpoint_of_before_says_nothing_of_the_log(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget(out, "metrics_sha256", "metrics_lines")
    path = Run(out).metrics.path
    path.write_text("")
    with caplog.at_level(logging.WARNING):
        assert run_tiny(out).finished
    assert not caplog.text


def test_the_recipe_of_a_checkpoint_is_all_of_it(out: Path) -> None:
    last = Run(out).checkpoints().latest()
    assert last is not None
    assert last.state()["recipe"] == json.loads(tiny().model_dump_json())
    assert to_yaml(Run(out).config()) == to_yaml(tiny())
