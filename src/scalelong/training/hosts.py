"""Before the first step of several processes: they see one folder, begin at one checkpoint, and train one recipe."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..runs.run_dir import ResumePoint, Run, RunError, check_folder, find_resume_point
from ..utils.records import flatten
from ..utils.runtime import Rank
from ..utils.team import check_shared

# What each host may have for itself.
OWN_KEYS = {"data.workers", "data.memory_gb", "data.prepared", "model.factory"}


def begin_together(run: Run, config: Config, resume: str | Path, rank: Rank) -> ResumePoint:
    """Where to begin, which is the same in all processes, or an error in all of them."""
    check_folder(run)
    steps = run.checkpoints().steps()
    check_shared(rank, run.folder, "run folder", f" (checkpoint of step {steps[-1]})" if steps else " (no checkpoint)")
    start = find_resume_point(run, config, resume)
    settings = flatten(config.model_dump(mode="json"))
    own: dict[str, Any] = {"host": socket.gethostname(), "start": describe_start(start), "digest": digest_of(start)}
    own["recipe"] = {key: value for key, value in settings.items() if key not in OWN_KEYS}
    first, *others = (json.loads(said) for said in rank.meet("where the others begin", json.dumps(own, default=str)))
    for number, other in enumerate(others, start=1):
        check_agrees(run, number, first, other)
    return start


def check_agrees(run: Run, number: int, first: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise if a process would begin with other weights, or train something else, than the first."""
    hosts = f"process 0 on {first['host']}", f"process {number} on {other['host']}"
    if first["digest"] != other["digest"]:
        raise RunError(
            f"the processes find different checkpoints for {run}: {hosts[0]} {first['start']}, {hosts[1]} "
            f"{other['start']}. Let all hosts see the same folder, then give the command again"
        )
    before, now = first["recipe"], other["recipe"]
    if differ := [key for key in {**before, **now} if before.get(key) != now.get(key)]:
        shown = ", ".join(f"{key} {before.get(key)} and {now.get(key)}" for key in differ[:3])
        raise RunError(f"{hosts[0]} and {hosts[1]} have different recipes ({shown}): give all hosts the same command")


def describe_start(start: ResumePoint) -> str:
    return "none" if start.checkpoint is None else f"step {start.step} ({digest_of(start)[:8]})"


def digest_of(start: ResumePoint) -> str:
    """Of the manifest, and so of all that is in the checkpoint."""
    files = {} if start.checkpoint is None else start.checkpoint.files
    return hashlib.sha256(json.dumps([start.step, files, start.same_run], sort_keys=True).encode()).hexdigest()
