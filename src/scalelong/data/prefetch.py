"""An iterator that runs ahead in a thread of its own, so that a step does not wait for its data."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

# How soon the thread notices that it is to stop while the queue is full.
PATIENCE = 0.05


@dataclass(frozen=True)
class End:
    """What the thread leaves last: the error that ended the iterator, or None if it just ended."""

    error: BaseException | None


class Prefetch(Generic[Item]):
    """The items of an iterator, of which up to `depth` are made before they are asked for.

    `make` is called in the thread with an event that is set when nothing more is wanted. An error of the iterator is
    raised where its item would have been, and again by every later call.
    """

    def __init__(self, make: Callable[[threading.Event], Iterator[Item]], depth: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event()
        self._end: End | None = None
        # The thread must not hold this object, or it would never be collected and the thread never end.
        work = (make, self._queue, self._stop)
        self._thread = threading.Thread(target=run_ahead, args=work, name="prefetch", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, shut_down, self._stop, self._queue, self._thread)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = self._end or self._queue.get()
        if not isinstance(item, End):
            return item
        self._end = item
        raise StopIteration if item.error is None else item.error

    def close(self) -> None:
        """Stop the thread and wait for it; nothing more comes."""
        self._finalizer()
        self._end = self._end or End(None)


def run_ahead(
    make: Callable[[threading.Event], Iterator[Any]], target: queue.Queue[Any], stop: threading.Event
) -> None:
    error = None
    try:
        for item in stoppable(make(stop), stop):
            put(item, target, stop)
    except BaseException as raised:  # Whatever it is, it belongs to the thread that asks for the item.
        error = raised
    put(End(error), target, stop)


def stoppable(items: Iterator[Any], stop: threading.Event) -> Iterator[Any]:
    """The items until told to stop; the iterator is closed in the thread that ran it."""
    try:
        while not stop.is_set():
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


def put(item: Any, target: queue.Queue[Any], stop: threading.Event) -> None:
    """Wait for room, but not longer than anybody wants the item."""
    while not stop.is_set():
        try:
            return target.put(item, timeout=PATIENCE)
        except queue.Full:
            continue


def shut_down(stop: threading.Event, source: queue.Queue[Any], thread: threading.Thread) -> None:
    """End the thread, and whoever waits for an item in another one."""
    stop.set()
    thread.join()
    while not source.empty():
        source.get_nowait()
    source.put_nowait(End(None))
