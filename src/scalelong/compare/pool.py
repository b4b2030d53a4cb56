"""The workers of a comparison, from outside: started, given jobs, listened to, and ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from ..training.signals import SUPERVISED

PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); from scalelong.compare.worker import main; main()"
"""Without the working directory among the places of modules: a user's queue.py there is not Python's."""
LOG = "workers.log"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Message = dict[str, Any]


class Worker:
    """One process; `job` is what it is at, None while it waits."""

    def __init__(self, log: Path, environment: dict[str, str], kept_open: Sequence[int]) -> None:
        with log.open("ab") as errors:
            self.process = Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                env=environment,
                pass_fds=tuple(kept_open),
                # Ctrl-C in a terminal reaches every process of the group: here only the comparison decides what stops.
                start_new_session=True,
            )
        self.job: Any = None
        self._rest = b""

    @property
    def output(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def give(self, job: Any, message: Message) -> None:
        """Hand over a job; a worker that has died shows it when it is listened to."""
        assert self.process.stdin is not None
        self.job = job
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[Message] | None:
        """What it said since the last time; None if it has ended."""
        received = os.read(self.output, 1 << 16)
        if not received:
            return None
        *lines, self._rest = (self._rest + received).split(b"\n")
        # A library that prints while it is imported is not meant.
        return [json.loads(line) for line in lines if line.startswith(b'{"kind"')]

    def interrupt(self) -> None:
        """Ask it to save and stop; one that is between two steps of its job ends at once.

        Whoever ends a whole job, as a cluster does, has sent it this signal already; it does not mind the second.
        """
        self.process.send_signal(signal.SIGTERM)

    def close(self, seconds: float = 10.0) -> int:
        """Let it end, by force if it does not; returns its exit code."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            code = self.process.wait(seconds)
        except TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.process.stdout.close()
        return code


class Pool:
    """At most `count` workers, each with its share of the cores or a GPU of its own, started when there is work.

    `kept_open` are files that they inherit.
    """

    def __init__(self, count: int, threads: int, folder: Path, kept_open: Sequence[int] = ()) -> None:
        self.count, self.threads = count, threads
        self.log, self.kept_open = folder / LOG, kept_open
        self.workers: dict[int, Worker] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *raised: object) -> None:
        for worker in self.workers.values():
            worker.close(seconds=10.0 if worker.job is None else 0.0)
        self._selector.close()

    @property
    def busy(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.job is not None]

    def find_idle(self) -> Worker | None:
        """A worker that waits for a job, a new one if there may be more; None if all are busy."""
        for number in range(self.count):
            worker = self.workers.get(number) or self._start(number)
            if worker.job is None:
                return worker
        return None

    def listen(self, seconds: float) -> Iterator[tuple[Any, Message]]:
        """What workers say about their jobs; the job of one that died has ended with the status `lost`."""
        for key, _ in self._selector.select(seconds):
            number: int = key.data
            worker = self.workers[number]
            job, messages = worker.job, worker.read()
            if messages is None:
                message = self._bury(number)
                if job is not None:
                    yield job, {"kind": "end", "status": "lost", "message": message}
                continue
            for message in messages:
                if message["kind"] == "end":
                    worker.job = None
                yield job, message

    def interrupt(self) -> None:
        """Ask those that are at work to save and stop."""
        for worker in self.busy:
            worker.interrupt()

    def _start(self, number: int) -> Worker:
        worker = Worker(self.log, environment(number, self.threads), self.kept_open)
        self.workers[number] = worker
        self._selector.register(worker.output, selectors.EVENT_READ, number)
        return worker

    def _bury(self, number: int) -> str:
        """Forget a worker that died; returns what it died of."""
        worker = self.workers.pop(number)
        self._selector.unregister(worker.output)
        code = worker.close()
        return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended ({code})"


def environment(number: int, threads: int) -> dict[str, str]:
    """The variables of a worker: its threads, its GPU if there are any, where this package is, and who minds it."""
    source = str(Path(__file__).resolve().parents[2])
    found = {**os.environ, **dict.fromkeys(THREADS, str(threads)), SUPERVISED: "1"}
    found["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    devices = visible_gpus()
    return found | ({"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {})


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] or [str(number) for number in range(count)]


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(workers: int) -> int:
    """An even share of the cores, unless OMP_NUM_THREADS asks for fewer: threads that wait for each other on a busy
    machine are slower than one."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(available_cores() // workers, int(asked) if asked.isdigit() else available_cores()))
