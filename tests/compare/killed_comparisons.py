"""A program that makes comparisons in child processes, and kills them at random moments.

`python killed_comparisons.py '[{"out": …, "methods": ["none", "cs"], "ends": ["SIGKILL", "SIGTERM", "worker"]}]'`

An `obstacle` is a file that makes one run fail at first. An end is a signal for the comparison; "everyone": then its
jobs and their server get a SIGTERM too; "worker" or "told": then a job gets a SIGKILL or a SIGTERM, and the
comparison is let finish. Comparisons are forked and share one server of jobs, because importing everything anew for
each of them would take most of the time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from comparison_cases import tiny_plan

from scalelong.compare import jobs
from scalelong.compare.grid import Plan, save_plan
from scalelong.compare.run import ADVICE, compare

torch.set_num_threads(1)


def main(plans: list[dict[str, Any]]) -> None:
    jobs.start_server(multiprocessing.get_context("forkserver"), jobs.job_environment(0, 1))
    # A comparison that is a child of this process could not ask whether the server, which is another child, runs.
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    for plan in plans:
        chance, out = random.Random(plan.get("seed", 0)), Path(plan["out"])
        save_plan(out, make(plan), "the same")
        (out / ADVICE).write_text("{}")  # Seconds of work, and no part of the tables.
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
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()
    code = os.waitstatus_to_exitcode(os.waitpid(start(plan), 0)[1])
    if code != 1:
        sys.exit(f"one run should have failed, not {code}")
    out = Path(plan["out"])
    shutil.copy(out / "results.json", out / "results-with-failure.json")
    obstacle.unlink()


def make(plan: dict[str, Any]) -> Plan:
    return tiny_plan(*plan["methods"], seeds=plan.get("seeds", 2), more=tuple(plan.get("overrides", ())))


def start(plan: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        result = compare(make(plan), plan["out"], workers=plan.get("workers", 2), command="the same")
        os._exit(128 + result.signal if result.signal else len(result.failures))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


CODES = {"worker": 0, "told": 0, "SIGKILL": -9, "SIGTERM": 143, "everyone": 143}


def end(child: int, how: str, out: Path) -> None:
    """Stop a comparison in its midst, or one of its jobs."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    while not (running := subprocess.run(["pgrep", "-P", str(server)], capture_output=True, text=True).stdout.split()):
        if has_ended(child):
            break
    if how in ("worker", "told"):
        send(running[:1], signal.SIGKILL if how == "worker" else signal.SIGTERM)
    elif how == "everyone":
        send([*running, server, child], signal.SIGTERM)
    else:
        os.kill(child, signal.Signals[how])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != CODES[how]:
        sys.exit(f"after {how} the exit code was {code}")
    status = json.loads((out / "results.json").read_text())["status"]
    if code == 0 and status != "finished":
        sys.exit(f"after {how} the comparison ended, but was {status}")


def send(processes: list[Any], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # It has ended just now.
            os.kill(int(process), number)


def has_ended(child: int) -> bool:
    return bool(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))


def progress(out: Path) -> int:
    """Lines that all runs have written."""
    return sum(log.read_bytes().count(b"\n") for log in out.glob("runs/*/*/metrics.jsonl"))


def wait_for_progress(out: Path, child: int, lines: int) -> None:
    """Return once so many more lines are written, or the comparison has ended."""
    before = progress(out)
    while progress(out) < before + lines:
        if has_ended(child):
            return
        time.sleep(0.005)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
