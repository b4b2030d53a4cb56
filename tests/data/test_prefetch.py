"""Laws of reading ahead: nothing is lost, reordered or hidden, and no thread is left behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from scalelong.data.prefetch import Prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def counted(taken: list[int], stop: int = 1_000_000) -> Iterator[int]:
    for number in range(stop):
        taken.append(number)
        yield number


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_items_come_in_order_and_then_it_ends() -> None:
    ahead = Prefetch(lambda stop: iter(range(100)), depth=3)
    assert list(ahead) == list(range(100))
    assert list(ahead) == []
    ahead.close()


def test_items_are_made_before_they_are_asked_for_but_not_more_than_fit() -> None:
    taken: list[int] = []
    ahead = Prefetch(lambda stop: counted(taken), depth=3)
    wait_until(lambda: len(taken) == 4)
    time.sleep(0.1)
    # Three wait in the queue and one for room in it.
    assert len(taken) == 4
    assert next(ahead) == 0
    wait_until(lambda: len(taken) == 5)
    ahead.close()


def test_an_error_is_raised_where_its_item_would_have_been_and_ever_after() -> None:
    def failing(stop: threading.Event) -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    ahead = Prefetch(failing, depth=3)
    assert next(ahead) == 1
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)
    ahead.close()


def test_closing_ends_the_thread_and_closes_the_iterator_in_it() -> None:
    closed: list[threading.Thread] = []

    def endless(stop: threading.Event) -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.append(threading.current_thread())

    ahead = Prefetch(endless, depth=2)
    next(ahead)
    (thread,) = threads()
    ahead.close()
    assert not thread.is_alive() and closed == [thread]
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()


def test_the_thread_ends_when_nobody_holds_the_iterator_any_more() -> None:
    ahead = Prefetch(lambda stop: counted([]), depth=2)
    assert next(ahead) == 0
    (thread,) = threads()
    del ahead
    gc.collect()
    assert not thread.is_alive()


def test_closing_tells_the_iterator_and_whoever_waits_for_it() -> None:
    ended: list[str] = []

    def waiting(stop: threading.Event) -> Iterator[int]:
        stop.wait(60)
        ended.append("iterator")
        yield 0

    ahead = Prefetch(waiting, depth=2)
    asking = threading.Thread(target=lambda: ended.append(f"caller got {next(ahead, None)}"))
    asking.start()
    ahead.close()
    asking.join()
    assert ended == ["iterator", "caller got None"]
