"""What the processes of a command wait for together; each is a thread here, and the store is in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from scalelong.utils import team as teams
from scalelong.utils.runtime import Rank
from scalelong.utils.team import DONE, FAILED, LostProcess, Team, Wire, check_shared, patience, together

PATIENCE = 0.6


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Team, Team]]:
    monkeypatch.setattr(teams, "SEEN_SECONDS", 0.1)
    store = HashStore()
    yield (both := tuple(Team(rank, 2, Wire(Rank(rank, 2), store, PATIENCE)) for rank in range(2)))
    for one in both:
        vanish(one)


def vanish(one: Team) -> None:
    assert one.wire is not None
    one.wire.closed = True
    one.wire.wake.set()
    one.wire.thread.join()


def in_both(two: tuple[Team, Team], work: Callable[[Team], Any]) -> list[Any]:
    """What the same work gives in both processes; what it raises counts, too."""

    def caught(one: Team) -> Any:
        try:
            return work(one)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(caught, two))


def test_at_a_meeting_everyone_hears_what_everyone_says(two: tuple[Team, Team]) -> None:
    heard = in_both(two, lambda one: [one.meet("more", f"{one.index}.{number}") for number in range(20)])
    assert heard == [[[f"0.{number}", f"1.{number}"] for number in range(20)]] * 2


def test_a_process_that_works_is_waited_for_however_long_it_takes(two: tuple[Team, Team]) -> None:
    def work(one: Team) -> list[str]:
        time.sleep(3 * PATIENCE * one.index)
        return one.meet("the slow one", "here")

    assert in_both(two, work) == [["here", "here"]] * 2


def test_a_process_that_fails_ends_the_wait_of_the_others_with_its_reason(two: tuple[Team, Team]) -> None:
    assert two[1].wire is not None
    two[1].wire.leave(FAILED, "the disk is full.")
    began = time.monotonic()
    with pytest.raises(LostProcess) as caught:
        two[0].wait("its part", lambda: False)
    assert time.monotonic() - began < PATIENCE
    assert "another process of this run (1 on " in str(caught.value)
    assert str(caught.value).endswith("failed: the disk is full; this one waited for its part")


def test_a_process_that_falls_silent_ends_the_wait_of_the_others_within_their_patience(two: tuple[Team, Team]) -> None:
    in_both(two, lambda one: one.meet("both"))
    vanish(two[1])
    began = time.monotonic()
    with pytest.raises(LostProcess, match=r"\(1 on .*\) was not heard of for 0.6 s .*; this one waited for its part"):
        two[0].meet("its part")
    assert PATIENCE / 2 < time.monotonic() - began < 4 * PATIENCE


def test_processes_that_all_wait_for_each_other_end(two: tuple[Team, Team]) -> None:
    ends = in_both(two, lambda one: one.wait(f"the file {one.index}", lambda: False))
    assert all(isinstance(end, LostProcess) for end in ends)
    assert any("nobody has worked for 0.6 s" in str(end) and "waits for the file" in str(end) for end in ends)


def test_what_a_process_that_is_done_has_not_left_behind_is_not_waited_for(two: tuple[Team, Team]) -> None:
    assert two[1].wire is not None
    two[1].wire.leave(DONE)
    with pytest.raises(LostProcess, match=r"this one waits for its part, .* has done its part\. Let all hosts see"):
        two[0].wait("its part", lambda: False)


def test_a_folder_that_both_see_is_shared_and_left_as_it_was(two: tuple[Team, Team], tmp_path: Path) -> None:
    assert in_both(two, lambda one: check_shared(one, tmp_path / "run", "run folder")) == [None, None]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_one_does_not_see_is_refused_in_both(two: tuple[Team, Team], tmp_path: Path) -> None:
    ends = in_both(two, lambda one: check_shared(one, tmp_path / str(one.index), "run folder", " (empty)"))
    assert str(ends[0]) == str(ends[1])
    assert "the run folder must be shared: process 0 on " in str(ends[0])
    assert f"wrote a file to {tmp_path}/0 (empty)" in str(ends[0])
    assert f"does not see it in {tmp_path}/1 (empty)" in str(ends[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf", "nan"])
def test_a_timeout_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(teams.TIMEOUT, text)
    with pytest.raises(ValueError, match=f"SCALELONG_TIMEOUT is a number of seconds above 0, .* not '{text}'"):
        patience()


def test_processes_that_do_not_find_each_other_say_where_they_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(teams.TIMEOUT, "0.5")
    monkeypatch.setattr(teams, "START_SECONDS", 0.5)
    with pytest.raises(LostProcess, match=r"did not find each other at 127\.0\.0\.1:1: "), together(Rank.here()):
        pass


def test_a_process_alone_waits_for_nobody() -> None:
    with together(Rank()) as alone:
        assert alone.meet("nobody", "here") == ["here"] and not alone.failure()
        alone.wait("nothing", partial(bool, 1))
