"""Several processes for one job on one machine, started here."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue

from ..utils.distributed import Rank
from .errors import DataError
from .images import Progress
from .prepare import Job, Prepared, prepare


def prepare_together(job: Job, processes: int, *, progress: Progress | None = None) -> Prepared:
    """`prepare` by so many processes, of which this is the first."""
    with started(job, processes) as others:
        prepared = prepare(job, Rank(0, processes), progress=progress, others=others)
    assert prepared is not None, "this is the first process"
    return prepared


@contextmanager
def started(job: Job, processes: int) -> Iterator[Callable[[], bool]]:
    """The other processes; yields whether one is still at work, which raises if one failed."""
    # Not forked: the libraries may hold threads and locks by now.
    context = multiprocessing.get_context("spawn")
    errors: SimpleQueue[str] = context.SimpleQueue()
    ranks = [Rank(rank, processes) for rank in range(1, processes)]
    others = [context.Process(target=take_part, args=(job, rank, errors), daemon=True) for rank in ranks]
    for other in others:
        other.start()

    try:
        yield lambda: at_work(others, errors)
    finally:
        for other in others:
            other.terminate()
            other.join()


def at_work(others: Sequence[BaseProcess], errors: SimpleQueue[str]) -> bool:
    """Whether one of the processes is still at work; raises what one of them failed of."""
    # Codes first: a process that fails says why before it ends.
    codes = [other.exitcode for other in others]
    if not errors.empty():
        raise DataError(errors.get())
    if any(code not in (None, 0) for code in codes):
        raise DataError("one of the processes was ended; the same command goes on with what is missing")
    return None in codes


def take_part(job: Job, rank: Rank, errors: SimpleQueue[str]) -> None:
    """What a started process does; Ctrl-C is for the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        prepare(job, rank, others=leave_with_parent)
    except (ValueError, OSError, ImportError) as error:
        errors.put(str(error))
        sys.exit(2)


def leave_with_parent() -> bool:
    """End this process if the one that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        sys.exit(1)
    return False
