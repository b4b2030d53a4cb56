"""A program that trains in child processes, and kills them with SIGKILL at random moments.

`python killed_runs.py '[{"out": …, "processes": 2, "kills": 3, "seed": 0, "overrides": […], "poisoned_rank": 1,
"averages": true, "readings": true, "evaluate": true, "measuring_seconds": 6}]'`

The children are forked, because importing everything anew for each of them would take most of the time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 (what a run imports when it needs it, imported once for all children)
import diffusers  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo
from run_cases import free_port, make_trainer, run_tiny, tiny
from safetensors.torch import save_file

from scalelong.data import Batch
from scalelong.evaluation import Evaluator, periodic
from scalelong.stability.monitor import SkipMonitor
from scalelong.stability.readings import storable
from scalelong.training import read_metrics
from scalelong.training.objective import Noised, Objective

torch.set_num_threads(1)


def main(plans: list[dict[str, Any]]) -> None:
    for plan in plans:
        out, overrides = Path(plan["out"]), plan.get("overrides", [])
        chance = random.Random(plan.get("seed", 0))
        for _ in range(plan.get("kills", 0)):
            children = start(plan)
            wait_for_step(out, chance.randint(1, tiny(*overrides).training.steps - 1), children)
            time.sleep(chance.uniform(0, 0.05))
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                os.waitpid(child, 0)
        codes = [os.waitpid(child, 0)[1] for child in start(plan)]
        if any(codes):
            sys.exit(f"the run in {out} failed: {codes}")


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
    try:
        if plan.get("averages"):
            keep_averages(plan, rank)
        elif plan.get("readings"):
            keep_readings(plan, rank)
        else:
            evaluate = Evaluator.open if plan.get("evaluate") else None
            run_tiny(Path(plan["out"]), *plan.get("overrides", []), monitor=SkipMonitor, evaluate=evaluate)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def keep_averages(plan: dict[str, Any], rank: int) -> None:
    """Train, and write this process's own averaged weights beside the checkpoints that the first one writes."""
    trainer = make_trainer(Path(plan["out"]), *plan.get("overrides", []))
    trainer.run()
    save_file(trainer.state.ema.state_dict(), Path(plan["out"]) / f"averages-{rank}.safetensors")


def keep_readings(plan: dict[str, Any], rank: int) -> None:
    """Train, and write what this process's own monitor read beside the log that the first one writes."""
    trainer = make_trainer(Path(plan["out"]), *plan.get("overrides", []), monitor=SkipMonitor)
    trainer.run()
    readings = [storable(reading.as_dict()) for reading in trainer.monitor.readings()]
    (Path(plan["out"]) / f"readings-{rank}.json").write_text(json.dumps(readings), encoding="utf-8")


def measure_slowly(seconds: float) -> None:
    """Let the figures of an evaluation take this long, and a collective fail after half of it."""
    measure = periodic.measure

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return measure(*arguments, **options)

    periodic.measure = late
    torch.distributed.distributed_c10d.default_pg_timeout = timedelta(seconds=seconds / 2)


def poison(batch_index: int) -> None:
    """Let this process's noise of one batch be NaN."""
    draw = Objective.noise

    def noise(self: Objective, batch: Batch) -> Noised:
        noised = draw(self, batch)
        return replace(noised, noise=noised.noise * float("nan")) if batch.step == batch_index else noised

    Objective.noise = noise


def wait_for_step(out: Path, step: int, children: list[int]) -> None:
    """Return once the log has reached a step, or a child has ended."""
    log = out / "metrics.jsonl"
    while not (log.exists() and any(line["step"] >= step for line in read_metrics(log))):
        if any(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children):
            return
        time.sleep(0.002)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
