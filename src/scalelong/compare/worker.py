"""A worker: a process that does one job after another, as told on its standard input in lines of JSON.

It answers on its standard output. It ends when its input does, so that a comparison that is killed leaves no worker
behind; checkpoints are complete or absent in any case.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..config import Config, parse_recipe
from ..evaluation import Evaluator, Plan, evaluate_run
from ..guard.nonfinite import TrainingDiverged
from ..monitor import SkipMonitor
from ..runs import Run
from ..training import Display, train
from ..utils.process import keep_freed_memory
from .advice import write_advice
from .collect import evaluated_weights
from .outcome import broken, judge, write_outcome

Message = dict[str, Any]

REPORT_SECONDS = 0.5


class Reporter(Display):
    """Tells the comparison how far a run is, now and then."""

    def __init__(self, channel: BinaryIO) -> None:
        super().__init__(lambda line: None)
        self.channel, self.told = channel, 0.0

    def start(self, step: int, steps: int) -> None:
        send(self.channel, {"kind": "progress", "step": step})

    def step(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if now - self.told > REPORT_SECONDS:
            self.told = now
            send(self.channel, {"kind": "progress", "step": step})


def main() -> None:
    keep_freed_memory()
    channel = take_stdout()
    jobs: queue.Queue[Message] = queue.Queue()
    threading.Thread(target=listen, args=(jobs,), daemon=True).start()
    # Finding the skips of a model asks the collector for referrers, which is slow with every library's objects in it.
    gc.freeze()
    send(channel, {"kind": "ready"})
    while True:
        send(channel, {"kind": "end", **perform(jobs.get(), channel)})


def take_stdout() -> BinaryIO:
    """The standard output for answers alone: what a library prints goes to the log with the errors."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return channel


def listen(jobs: queue.Queue[Message]) -> None:
    for line in sys.stdin.buffer:
        jobs.put(json.loads(line))
    # Without clean-up: the main thread may be in the middle of a step, and nobody waits for it.
    os._exit(0)


def send(channel: BinaryIO, message: Message) -> None:
    try:
        channel.write(json.dumps(message).encode() + b"\n")
        channel.flush()
    except BrokenPipeError:
        os._exit(0)


def perform(job: Mapping[str, Any], channel: BinaryIO) -> Message:
    """Do a job; an error is an answer too, and stands in the log with its traceback."""
    sys.argv = list(job["command"])
    config = parse_recipe(job["config"])
    try:
        if job["kind"] == "advice":
            write_advice(config, Path(job["path"]))
            return {"status": "finished", "message": None}
        return run(config, Path(job["path"]), Reporter(channel))
    except Exception as error:  # Whatever stops one run must not stop the others.
        print(f"{job['path']}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return {"status": "failed", "message": " ".join(f"{error or type(error).__name__}".split())}


def run(config: Config, folder: Path, display: Display) -> Message:
    """Train, or go on; then measure what is measured once, and write down how it ended."""
    try:
        with noticing_signals() as told:
            train(config, folder, display=display, monitor=SkipMonitor, evaluate=Evaluator.open)
            if told():
                return {"status": "stopped", "message": None}
        outcome = judge(folder, config)
    except TrainingDiverged as error:
        outcome = broken(config, Run(folder).metrics.last_step(), str(error))
    if outcome.status == "finished":
        evaluate_end(folder, config)
    write_outcome(folder, outcome)
    return {"status": outcome.status, "message": outcome.message}


@contextmanager
def noticing_signals() -> Iterator[Callable[[], bool]]:
    """Whether a signal has come since, whoever handled it: a trainer does not tell of one during its last step."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield lambda: bool(select.select([reading], [], [], 0)[0])
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def evaluate_end(folder: Path, config: Config) -> None:
    """Evaluate the weights of the last step that a signal kept the trainer from."""
    wanted, done = config.evaluation, evaluated_weights(folder, config)
    missing: Any = tuple(weights for weights in wanted.chosen if weights not in done)
    if wanted.every is not None and missing:
        evaluate_run(folder, Plan(wanted.images, missing, wanted.network))


if __name__ == "__main__":
    main()
