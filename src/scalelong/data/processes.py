"""Several processes for one job on one machine, started here."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue

from .errors import DataError
from .images import Progress
from .prepare import Job, Prepared, Share, prepare


def prepare_together(job: Job, processes: int, *, progress: Progress | None = None) -> Prepared:
    """`prepare` by so many processes, of which this is the first."""
    with started(job, processes) as others:
        prepared = prepare(job, Share(0, processes), progress=progress, others=others)
    assert prepared is not None, "this is the first process"
    return prepared


@contextmanager
def started(job: Job, processes: int) -> Iterator[Callable[[], bool]]:
    """The other processes; yields whether one is still at work, which raises if one failed."""
    # Not forked: the libraries may hold threads and locks by now.
    context = multiprocessing.get_context("spawn")
    errors: SimpleQueue[str] = context.SimpleQueue()
    shares = [Share(rank, processes) for rank in range(1, processes)]
    others = [context.Process(target=take_share, args=(job, share, errors), daemon=True) for share in shares]
    for other in others:
        other.start()

    def at_work() -> bool:
        if not errors.empty():
            raise DataError(errors.get())
        if any(other.exitcode not in (None, 0) for other in others):
            raise DataError("one of the processes was ended; the same command goes on with what is missing")
        return any(other.exitcode is None for other in others)

    try:
        yield at_work
    finally:
        for other in others:
            other.terminate()
            other.join()


def take_share(job: Job, share: Share, errors: SimpleQueue[str]) -> None:
    """What a started process does; Ctrl-C is for the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        prepare(job, share, others=leave_with_parent)
    except (ValueError, OSError, ImportError) as error:
        errors.put(str(error))
        sys.exit(2)


def leave_with_parent() -> bool:
    """End this process if the one that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        sys.exit(1)
    return False
