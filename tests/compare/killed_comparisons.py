"""A program that makes comparisons in child processes, and kills them at random moments.

`python killed_comparisons.py '[{"out": …, "methods": ["none", "cs"], "ends": ["SIGKILL", "SIGTERM", "worker"]}]'`

An `obstacle` is a file that makes one run fail at first. An end is a signal for the comparison, "everyone": then its
workers get a SIGTERM too, or "worker" or "told": then one of its workers gets a SIGKILL or a SIGTERM, and the
comparison is let finish. Processes are forked, because importing everything anew for each of them would take most of
the time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from comparison_cases import tiny_plan

from scalelong.compare import pool, worker
from scalelong.compare.folder import save_plan
from scalelong.compare.plan import Plan
from scalelong.compare.runner import compare
from scalelong.training.logger import Silent

torch.set_num_threads(1)


class Forked:
    """What `subprocess.Popen` is to a worker, made by a fork of this process."""

    def __init__(self, command: list[str], *, stderr: Any, env: dict[str, str], pass_fds: tuple[int, ...], **_: Any):
        (to_read, self.to_write), (self.to_listen, to_speak) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            for own, number in ((to_read, 0), (to_speak, 1), (stderr.fileno(), 2)):
                os.dup2(own, number)
            for number in set(range(3, 256)) - set(pass_fds):
                with suppress(OSError):
                    os.close(number)
            os.environ.clear()
            os.environ.update(env)
            sys.stdin = os.fdopen(0)
            worker.main()
        os.close(to_read)
        os.close(to_speak)
        self.stdin, self.stdout = os.fdopen(self.to_write, "wb"), os.fdopen(self.to_listen, "rb")

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> int:
        end = time.monotonic() + (60 if seconds is None else seconds)
        while time.monotonic() < end:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        raise subprocess.TimeoutExpired("worker", seconds or 60)


def main(plans: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        # A first run imports what runs import when they need it, once for all children.
        worker.run(tiny_plan().runs[0].config, Path(folder) / "run", Silent())
    pool.Popen = Forked  # type: ignore[assignment,misc]
    worker.write_advice = lambda config, path: path.write_text("{}")  # Seconds of work, and no part of the tables.
    for plan in plans:
        chance, out = random.Random(plan.get("seed", 0)), Path(plan["out"])
        if "obstacle" in plan:
            fail_once(plan, out / plan["obstacle"])
        for how in plan.get("ends", ()):
            child = start(plan)
            wait_for_progress(out, child, chance.randint(1, 12))
            time.sleep(chance.uniform(0, 0.2))
            end(child, how, out)
        code = os.waitstatus_to_exitcode(os.waitpid(start(plan), 0)[1])
        if code:
            sys.exit(f"the comparison in {out} failed: {code}")


def fail_once(plan: dict[str, Any], obstacle: Path) -> None:
    """Let one run fail because of a file in its folder, keep the results, and take the file away."""
    made, out = make(plan), Path(plan["out"])
    save_plan(out, made, "the same")
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()
    code = os.waitstatus_to_exitcode(os.waitpid(start(plan), 0)[1])
    if code != 1:
        sys.exit(f"one run should have failed, not {code}")
    shutil.copy(out / "results.json", out / "results-with-failure.json")
    obstacle.unlink()


def make(plan: dict[str, Any]) -> Plan:
    return tiny_plan(*plan["methods"], seeds=plan.get("seeds", 2), more=tuple(plan.get("overrides", ())))


def start(plan: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        ending = compare(make(plan), plan["out"], workers=plan.get("workers", 2), command="the same")
        os._exit(128 + ending.signal if ending.signal else len(ending.failures))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


CODES = {"worker": 0, "told": 0, "SIGKILL": -9, "SIGTERM": 143, "everyone": 143}


def end(child: int, how: str, out: Path) -> None:
    """Stop a comparison in its midst, or one of its workers."""
    workers = subprocess.run(["pgrep", "-P", str(child)], capture_output=True, text=True).stdout.split()
    if how in ("worker", "told"):
        os.kill(int(workers[0]), signal.SIGKILL if how == "worker" else signal.SIGTERM)
    elif how == "everyone":
        for number in (*workers, child):
            os.kill(int(number), signal.SIGTERM)
    else:
        os.kill(child, signal.Signals[how])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != CODES[how]:
        sys.exit(f"after {how} the exit code was {code}")
    status = json.loads((out / "results.json").read_text())["status"]
    if code == 0 and status != "finished":
        sys.exit(f"after {how} the comparison ended, but was {status}")


def progress(out: Path) -> int:
    """Lines that all runs have written."""
    return sum(log.read_bytes().count(b"\n") for log in out.glob("runs/*/*/metrics.jsonl"))


def wait_for_progress(out: Path, child: int, lines: int) -> None:
    """Return once so many more lines are written, or the comparison has ended."""
    before = progress(out)
    while progress(out) < before + lines:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.005)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
