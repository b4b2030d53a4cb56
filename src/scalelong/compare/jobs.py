"""One process for each run: `submit` starts it, `poll` tells how it ended.

Processes are forked from a server that has imported what runs need. What a job found is in its run's files; what it
printed, with the traceback of an error, is in its log.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from ..config import Config
from ..config.load import check_config
from ..config.schema import PythonConfig
from ..kappa.advisor import advise_recipe
from ..training.parallel import SUPERVISED
from ..utils.atomic import read_json
from ..utils.records import damage_of_run
from . import outcome
from .grid import FILE, PlanError, naming_plan, write_json
from .outcome import STOPPED

ADVICE = "kappa.json"

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"  # Windows
PRELOADED = ["scalelong.compare.jobs", "diffusers", "sklearn.datasets", "torch._dynamo"]
# glibc reads them when a process starts: memory that was freed is used again, as in `scalelong.cli`.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Job:
    """Something for a process to do with a recipe: to train in a folder, or to write a file."""

    path: Path
    config: Config
    log: Path
    work: Callable[[Path, Config], None]


@dataclass(frozen=True)
class End:
    """How the process of a job ended: `lost` if it was killed or crashed."""

    status: Literal["done", "stopped", "failed", "lost"]
    message: str | None = None


def submit(job: Job, slot: int, threads: int) -> Any:
    """Start the process of a job; jobs of different slots get different GPUs."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    environment = job_environment(slot, threads)
    context: Any = multiprocessing.get_context(METHOD)
    process = context.Process(target=perform, args=(job, environment, threads))
    # Without the user's script, which each new process would run once more.
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        start_server(context, environment)
        process.start()
    finally:
        sys.modules["__main__"] = main
    return process


def poll(job: Job, process: Any) -> End | None:
    """How a job ended; None while it runs."""
    code = process.exitcode
    if not code:
        return None if code is None else End("done")
    if code in (STOPPED, -signal.SIGTERM):
        return End("stopped", "its process was told to stop")
    if code == 1:  # The last line of the log is the error.
        return End("failed", job.log.read_text(errors="replace").strip().rpartition("\n")[2])
    return End("lost", f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")


def start_server(context: Any, environment: Mapping[str, str]) -> None:
    """Start the process that jobs are forked from, unless it runs.

    Signals that reach all processes of a terminal or of a cluster's job do not end it, because only the comparison
    decides what stops. It starts in another working directory, where a user's queue.py is not Python's.
    """
    if METHOD != "forkserver":
        return
    from multiprocessing import forkserver

    context.set_forkserver_preload(PRELOADED)
    directory, variables = Path.cwd(), dict(os.environ)
    os.environ.update(environment)
    os.chdir(Path(__file__).parent)
    try:
        resource_tracker.ensure_running()  # It would lift the mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)


def perform(job: Job, environment: Mapping[str, str], threads: int) -> None:
    """What the process of a job does."""
    with suppress(AttributeError):  # Windows
        # Ctrl-C in a terminal reaches every process of the group: here only the comparison decides what stops.
        os.setsid()
    with job.log.open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    # Finding the skips of a model asks the collector for referrers, which is slow with every library's objects in it.
    gc.freeze()
    with suppress(AttributeError):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        job.work(job.path, job.config)
    except Exception as error:
        traceback.print_exc()
        sys.exit(" ".join(f"{error or type(error).__name__}".split()))


def end_with_parent() -> None:
    """A comparison that is killed leaves no run behind; checkpoints are complete or absent in any case."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(0)


def find_job(path: Path, *, allow_code: bool = False) -> Job:
    """The job of a run's folder, or of the advice, in a comparison; its recipe is the one that the comparison keeps."""
    folder = next((place for place in path.absolute().parents if (place / FILE).is_file()), None)
    if folder is None:
        raise PlanError(
            f"{path} is not in a comparison: scalelong compare RECIPE --jobs begins one, and names its jobs"
        )
    parts = path.absolute().relative_to(folder).parts
    with naming_plan(folder):
        plan = read_json(folder / FILE)
        arms = {arm["id"]: arm["config"] for arm in plan["arms"]}
        names: dict[tuple[str, ...], tuple[str, int | None]] = {
            ("runs", arm, f"seed-{seed}"): (arm, seed) for arm in arms for seed in plan["seeds"]
        }
        names[(ADVICE,)] = plan["arms"][0]["id"], None
        edge = bool(plan.get("edge_rates"))
    if parts not in names:
        raise PlanError(
            f"{path} is none of the {len(names)} jobs of {folder}: give its command with --jobs to list them"
        )
    arm, seed = names[parts]
    config = check_config(arms[arm], {(): f"{folder / FILE}, {arm}"})
    if isinstance(config.model, PythonConfig) and not allow_code:
        raise PlanError(
            f"{folder} has a network of its own, {config.model.factory}: look at it, then give --allow-code"
        )
    if seed is None:
        return Job(path, config, folder, write_advice)
    work = outcome.run_until_failed if edge else outcome.run
    return Job(path, config.model_copy(update={"seed": seed}), folder, work)


def is_done(job: Job) -> bool:
    """Whether nothing is left to do; a training that failed is a result."""
    if job.work is write_advice:
        return job.path.is_file()
    return outcome.read_outcome(job.path) is not None and not damage_of_run(job.path)


def write_advice(file: Path, config: Config) -> None:
    """The job of the κ advice: measure the recipe's unscaled network on what it would train on."""
    write_json(file, advise_recipe(config).summary())


def job_environment(slot: int, threads: int) -> dict[str, str]:
    """The variables of a job: its threads, its GPU if there are any, and that its parent passes signals on."""
    found = {**KEPT_MEMORY, **os.environ, **dict.fromkeys(THREADS, str(threads)), SUPERVISED: "1"}
    devices = visible_gpus()
    return found | ({"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if devices else {})


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
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
