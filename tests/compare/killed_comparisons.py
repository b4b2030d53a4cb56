"""A program that makes comparisons by the command line in child processes, and stops them at random moments.

`python killed_comparisons.py '{"arguments": ["compare", …], "folder": …, "ends": {"killed": ["SIGKILL", "worker"]}}'`

In the folder, `whole` is a comparison that is left alone, and each of the others is ended in these ways. An end is a
signal for the comparison; "everyone": then its jobs and their server get a SIGTERM too; "worker" or "told": then a job
gets a SIGKILL or a SIGTERM, and the comparison is let finish; "fails": a run cannot begin because of a file in its
folder. Comparisons are forked and share one server of jobs, because importing everything anew for each of them would
take most of the time.
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

import scipy.stats
import torch

import scalelong.cli.compare_display
from scalelong.cli.app import app
from scalelong.compare import jobs
from scalelong.config import load_recipe, summarise

torch.set_num_threads(1)
# What each of the comparisons would import anew.
IMPORTED = scalelong.cli.compare_display, scipy.stats, summarise(load_recipe("digits"))
CODES = {"worker": 0, "told": 0, "fails": 1, "SIGKILL": -9, "SIGTERM": 143, "everyone": 143}


def main(arguments: list[str], folder: str, ends: dict[str, list[str]]) -> None:
    jobs.start_server(multiprocessing.get_context("forkserver"), jobs.job_environment(0, 1))
    # A comparison that is a child of this process could not ask whether the server, which is another child, runs.
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    whole, chance = Path(folder) / "whole", random.Random(0)
    finish(whole, arguments)
    for name, ways in ends.items():
        place = whole.with_name(name)
        (place / "out").mkdir(parents=True)
        for file in ("comparison.json", "kappa.json"):  # The advice is no part of the tables.
            shutil.copy(whole / "out" / file, place / "out" / file)
        for how in ways:
            end(place, start(place, arguments, how), how, chance)
        finish(place, arguments)


def finish(place: Path, arguments: list[str]) -> None:
    code = exit_code(start(place, arguments))
    if code:
        sys.exit(f"the comparison in {place} failed: {code}\n{(place / 'stderr').read_text()}")


def start(place: Path, arguments: list[str], how: str = "") -> int:
    """Fork a comparison, with what it prints in two files beside its folder."""
    place.mkdir(exist_ok=True)
    if how == "fails":
        (place / "out" / OBSTACLE).parent.mkdir(parents=True)
        (place / "out" / OBSTACLE).touch()
    child = os.fork()
    if child:
        return child
    sys.argv = ["scalelong", *arguments, "--out", str(place / "out")]
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    code: Any = 1
    try:
        app()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


OBSTACLE = "runs/cs-lr0.004/seed-0/thesis.tex"


def end(place: Path, child: int, how: str, chance: random.Random) -> None:
    """Stop a comparison in its midst, or one of its jobs; of one with a run that fails, keep the results."""
    out = place / "out"
    if how != "fails":
        wait_for_progress(out, child, chance.randint(1, 8))
        time.sleep(chance.uniform(0, 0.2))
        send_signals(child, how)
    code, status = exit_code(child), json.loads((out / "results.json").read_text())["status"]
    if code != CODES[how] or (code == 0 and status != "finished"):
        sys.exit(f"after {how} the exit code was {code}, and the comparison was {status}")
    if how == "fails":
        shutil.copy(out / "results.json", place / "results-with-failure.json")
        (out / OBSTACLE).unlink()


def send_signals(child: int, how: str) -> None:
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    while not (running := subprocess.run(["pgrep", "-P", str(server)], capture_output=True, text=True).stdout.split()):
        if has_ended(child):
            break
    number = signal.Signals[{"worker": "SIGKILL", "told": "SIGTERM", "everyone": "SIGTERM"}.get(how, how)]
    targets = {"worker": running[:1], "told": running[:1], "everyone": [*running, server, child]}
    for process in targets.get(how, [child]):
        with suppress(ProcessLookupError):  # It has ended just now.
            os.kill(int(process), number)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def has_ended(child: int) -> bool:
    return bool(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))


def progress(out: Path) -> int:
    """Lines that all runs have written."""
    return sum(log.read_bytes().count(b"\n") for log in out.glob("runs/*/*/metrics.jsonl"))


def wait_for_progress(out: Path, child: int, lines: int) -> None:
    """Return once so many more lines are written, or the comparison has ended."""
    before = progress(out)
    while progress(out) < before + lines and not has_ended(child):
        time.sleep(0.005)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
