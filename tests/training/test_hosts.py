"""Processes that would begin with other weights, or train something else, begin nothing. Each is a thread here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from run_cases import run_tiny, tiny
from torch.distributed import HashStore

from scalelong.runs import Run
from scalelong.training.hosts import begin_together
from scalelong.utils import team as teams
from scalelong.utils.runtime import Rank
from scalelong.utils.team import Team, Wire


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Team]]:
    monkeypatch.setattr(teams, "SEEN_SECONDS", 0.1)
    store = HashStore()
    yield (both := [Team(rank, 2, Wire(Rank(rank, 2), store, 20)) for rank in range(2)])
    for one in both:
        assert one.wire is not None
        one.wire.closed = True
        one.wire.wake.set()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    run_tiny(tmp_path_factory.mktemp("trained") / "run")
    return tmp_path_factory.getbasetemp() / "trained0" / "run"


def begin(two: list[Team], folders: list[Path], *overrides: tuple[str, ...]) -> list[Any]:
    """Where both begin, or why they do not."""

    def caught(one: Team) -> Any:
        config = tiny(*(overrides[one.index] if overrides else ()))
        try:
            return begin_together(Run(folders[one.index]), config, "auto", one)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(caught, two))


def test_both_begin_at_the_last_checkpoint_of_the_folder_that_they_share(two: list[Team], trained: Path) -> None:
    assert [start.step for start in begin(two, [trained] * 2)] == [8, 8]


def test_both_begin_anew_in_a_new_folder(two: list[Team], tmp_path: Path) -> None:
    assert [start.step for start in begin(two, [tmp_path / "run"] * 2)] == [0, 0]


def test_a_shared_folder_with_other_checkpoints_on_one_host_is_refused_in_both(
    two: list[Team], trained: Path, tmp_path: Path
) -> None:
    """As where one host has mounted something else over a part of it."""
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints" / "step-000008")
    (tmp_path / "other").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "environment.json"):
        (tmp_path / "other" / name).symlink_to(tmp_path / "run" / name)
    (tmp_path / "other" / "checkpoints").symlink_to(tmp_path / "checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalelong.training.hosts.check_shared", lambda *_: None)
        ends = begin(two, [tmp_path / "run", tmp_path / "other"])
    assert all("the processes find different checkpoints for " in end for end in ends)
    assert all("process 0 on " in end and " step 8 (" in end and " step 6 (" in end for end in ends)


def test_other_weights_under_the_same_step_are_refused_in_both(two: list[Team], trained: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", "optim.lr=1e-2")
    shutil.copy(trained / "config.yaml", tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalelong.training.hosts.check_shared", lambda *_: None)
        patch.setattr("scalelong.runs.run_dir.check_same_run", lambda *_: None)
        ends = begin(two, [trained, tmp_path / "run"])
    assert all("the processes find different checkpoints for " in end for end in ends)


def test_other_settings_on_one_host_are_refused_in_both(two: list[Team], tmp_path: Path) -> None:
    ends = begin(two, [tmp_path / "run"] * 2, (), ("optim.lr=5e-4",))
    assert all(re.search(r"have different recipes \(optim.lr \S+ and 0.0005\)", end) for end in ends)


def test_what_each_host_may_have_for_itself_is_not_compared(two: list[Team], tmp_path: Path) -> None:
    ends = begin(two, [tmp_path / "run"] * 2, ("data.workers=1",), ("data.workers=2",))
    assert [start.step for start in ends] == [0, 0]
