"""A program that trains in child processes, and kills them with SIGKILL at random steps, and once while they start.

Each line of its input is a job, its answer the exit code of it: `{"folder": where to work, "said": a file for all that
is said, "runs": [{"out": …, "processes": 2, "kills": 3, "seed": 0, "overrides": […], "poisoned_rank": 1,
"averages": true, "readings": true, "measuring_seconds": 6, "command": ["train", …], "code": 2, "failing_rank": 0,
"fails_at": "scalelong.utils.atomic.Files.rename", "beside": true}]}`.

Runs are done one after another; one `beside` others only begins when it is its turn. Jobs and runs are forked, because
importing everything anew for each of them would take most of the time.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import pkgutil
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from run_cases import free_port, make_trainer, run_tiny, tiny
from safetensors.torch import save_file

from scalelong.cli.app import app
from scalelong.data import Batch
from scalelong.evaluation import evaluate as evaluating
from scalelong.monitor.readings import with_nulls
from scalelong.runs import Run
from scalelong.training import samples
from scalelong.training.loss import DiffusionLoss, NoisyBatch
from scalelong.training.parallel import launched
from scalelong.utils.team import TIMEOUT

# What a run imports when it needs it, imported once for all children.
for module in ("diffusers", "sklearn.datasets", "torchmetrics.image.kid"):
    with suppress(ImportError):
        import_module(module)

torch.set_num_threads(1)


def serve() -> None:
    """Do each job in a process of its own, which has ten minutes."""
    gc.collect()
    gc.freeze()  # `scale_skips` looks for what refers to a model among all that is not frozen.
    for line in sys.stdin:
        child = os.fork()
        if not child:
            signal.alarm(600)
            do(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def do(folder: str, said: str, runs: list[dict[str, Any]]) -> None:
    """Do one job, and end the process."""
    os.chdir(folder)
    with open(said, "w", encoding="utf-8") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    try:
        train_all(runs)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def train_all(plans: list[dict[str, Any]]) -> None:
    beside = []
    for plan in plans:
        kills, chance = plan.get("kills", 0), random.Random(plan.get("seed", 0))
        hits = sum(kill_at_a_step(plan, chance) for _ in range(kills))
        # A machine that is busy with other things may let a run finish before the kill comes.
        if 2 * hits < kills:
            sys.exit(f"only {hits} of {kills} kills hit a step of the run in {plan['out']}")
        if kills:
            kill_at_start(plan, chance)
        children = start(plan)
        if plan.get("beside"):
            beside.append((plan, children))
        else:
            check_end(plan, children)
    for plan, children in beside:
        check_end(plan, children)


def check_end(plan: dict[str, Any], children: list[int]) -> None:
    """Wait for the processes of a run; each must end with the code that the plan says, 0 unless it does."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(code != plan.get("code", 0) for code in codes):
        sys.exit(f"the run in {plan['out']} failed: {codes}")


def kill_at_a_step(plan: dict[str, Any], chance: random.Random) -> bool:
    """Start the run, and kill it a few steps further on; whether it was still training by then."""
    out, before = Path(plan["out"]), len(starts_of(Path(plan["out"])))
    children = start(plan)
    if not wait(children, lambda: len(starts_of(out)) > before):
        return kill(children)
    # By now the log ends where the run goes on: what it shows from here on is of these children.
    first, steps = starts_of(out)[-1]["step"], tiny(*plan.get("overrides", [])).training.steps
    target = chance.randint(first + 1, max(first + 1, min(first + 4, steps - 2)))
    wait(children, lambda: reached(out) >= target)
    time.sleep(chance.uniform(0, 0.02))
    return kill(children)


def kill_at_start(plan: dict[str, Any], chance: random.Random) -> None:
    children = start(plan)
    time.sleep(chance.uniform(0, 0.5))
    kill(children)


def kill(children: list[int]) -> bool:
    """Kill processes that may have ended by themselves; whether all of them were still running."""
    for child in children:
        os.kill(child, signal.SIGKILL)
    return all([os.WIFSIGNALED(os.waitpid(child, 0)[1]) for child in children])


def wait(children: list[int], condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds; False if a child has ended before."""
    while not condition():
        if any(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children):
            return False
        time.sleep(0.002)
    return True


def starts_of(out: Path) -> list[dict[str, Any]]:
    """What the run's folder says about each time that the run was begun or resumed."""
    return Run(out).starts()


def reached(out: Path) -> int:
    return Run(out).metrics.last_step()


def start(plan: dict[str, Any]) -> list[int]:
    port = free_port()
    return [fork(plan, rank, port) for rank in range(plan.get("processes", 1))]


def fork(plan: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    if plan.get("processes", 1) > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan["processes"], "MASTER_PORT": port}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "MASTER_ADDR": "127.0.0.1"}
    if "measuring_seconds" in plan:
        measure_slowly(plan["measuring_seconds"])
    if rank == plan.get("poisoned_rank"):
        poison(batch_index=3)
    if plan.get("fails_at") and rank == plan["failing_rank"]:
        fail_at(plan["fails_at"])
    try:
        if "command" in plan:
            os._exit(run_command(plan, rank))
        elif plan.get("averages"):
            keep_averages(plan, rank)
        elif plan.get("readings"):
            keep_readings(plan, rank)
        else:
            run_tiny(Path(plan["out"]), *plan.get("overrides", []))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_command(plan: dict[str, Any], rank: int) -> int:
    """`scalelong …` as a user runs it; what it prints and says is kept beside the run. Returns the exit code."""
    with open(f"{plan['out']}-printed-{rank}", "wb") as printed, open(f"{plan['out']}-said-{rank}", "wb") as said:
        os.dup2(printed.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            app(plan["command"])
        except SystemExit as end:
            sys.stdout.flush()
            return int(end.code or 0)
        except BaseException:
            traceback.print_exc()
    return 1


def fail_at(name: str) -> None:
    """Let a method, given as `module.Class.method`, find no room on the disk."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place, _, method = name.rpartition(".")
    setattr(pkgutil.resolve_name(place), method, full)


def keep_averages(plan: dict[str, Any], rank: int) -> None:
    """Train, and write this process's own EMA weights beside the checkpoints that the first one writes."""
    with launched() as own:
        trainer = make_trainer(Path(plan["out"]), *plan.get("overrides", []), rank=own)
        trainer.train()
    save_file(trainer.state.ema.state_dict(), Path(plan["out"]) / f"averages-{rank}.safetensors")


def keep_readings(plan: dict[str, Any], rank: int) -> None:
    """Train, and write what this process's own monitor read beside the log that the first one writes."""
    with launched() as own:
        trainer = make_trainer(Path(plan["out"]), *plan.get("overrides", []), rank=own)
        trainer.train()
    readings = with_nulls(trainer.monitor.readings())
    (Path(plan["out"]) / f"readings-{rank}.json").write_text(json.dumps(readings), encoding="utf-8")


def measure_slowly(seconds: float) -> None:
    """Let a grid and the figures of an evaluation take this long, and all that waits for nobody fail after less."""
    for module, name in ((samples, "sample_network"), (evaluating, "figures_of")):
        setattr(module, name, delayed(getattr(module, name), seconds))
    os.environ[TIMEOUT] = str(0.7 * seconds)


def delayed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **options)

    return late


def poison(batch_index: int) -> None:
    """Let this process's noise of one batch be NaN."""
    draw = DiffusionLoss.sample_noise

    def noise(self: DiffusionLoss, batch: Batch) -> NoisyBatch:
        noised = draw(self, batch)
        return replace(noised, noise=noised.noise * float("nan")) if batch.step == batch_index else noised

    DiffusionLoss.sample_noise = noise


if __name__ == "__main__":
    serve()
