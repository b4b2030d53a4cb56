"""The comparison's folder: its plan, which may grow but not change, and a lock that its workers share."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..runs.run_dir import LOCK, Run, check_folder, flatten
from ..utils.atomic import Files, atomic_write, to_json
from .plan import Plan, PlanError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FILE = "comparison.json"
VERSION = 1
WAIT_SECONDS = 10.0


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as JSON, with every arm's resolved recipe."""
    return {
        "version": VERSION,
        "recipe": plan.recipe,
        "seeds": list(plan.seeds),
        "baseline": plan.baseline.id,
        "arms": [
            {"id": arm.id, "label": arm.label, "setting": arm.setting, "config": arm.config.model_dump(mode="json")}
            for arm in plan.arms
        ],
    }


def save_plan(folder: Path, plan: Plan, command: str) -> str:
    """Write what is compared, if the folder is free for it; returns when the comparison was first begun."""
    check_plan(folder, plan)
    created = read_plan(folder).get("created") or now()
    content = {"created": created, "command": command, **describe_plan(plan)}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, content)
    return created


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan in a folder; empty if it has none."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise PlanError(f"{path} is damaged ({error}): choose another --out") from error
    if content.get("version") != VERSION:
        raise PlanError(f"{path} is of version {content.get('version')}, and this is {VERSION}: choose another --out")
    return content


def check_plan(folder: Path, plan: Plan) -> None:
    """Raise unless the folder is new, or holds this comparison or a part of it."""
    before = read_plan(folder)
    if not before:
        if Run(folder).exists:
            raise PlanError(f"{folder} is the folder of a single run: choose another --out")
        check_folder(Run(folder))
        return
    arms = {arm["id"]: arm["config"] for arm in describe_plan(plan)["arms"]}
    for arm in before["arms"]:
        if arm["id"] not in arms:
            raise PlanError(f"{folder} holds a comparison with {arm['id']}, which is not asked for now{HINT}")
        check_config(folder, arm["id"], arm["config"], arms[arm["id"]])
    missing = [seed for seed in before["seeds"] if seed not in plan.seeds]
    if missing:
        raise PlanError(f"{folder} holds a comparison with {len(before['seeds'])} seeds, now {len(plan.seeds)}{HINT}")
    if before["baseline"] != plan.baseline.id:
        raise PlanError(f"{folder} compares with {before['baseline']}, not with {plan.baseline.id}{HINT}")


HINT = ": give the same command to go on, more seeds or methods to extend it, or another --out"


def check_config(folder: Path, arm: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    old, new = flatten(before), flatten(now)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        shown = ", ".join(f"{key} {old.get(key)} → {new.get(key)}" for key in changed[:4])
        raise PlanError(f"{folder} holds a comparison with other settings of {arm} ({shown}){HINT}")


def write_json(path: Path, content: Any) -> None:
    atomic_write(path, lambda temporary: Files().write_bytes(temporary, to_json(content) + b"\n"))


@contextmanager
def locked(folder: Path, wait: float = WAIT_SECONDS) -> Iterator[list[int]]:
    """Hold the folder's lock; gives the files that workers must inherit, so that it is held until the last one ends.

    Waits a while: the workers of a comparison that was killed just now need a moment to notice.
    """
    if fcntl is None or sys.platform == "win32":
        yield []
        return
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + wait
    with (folder / LOCK).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise PlanError(f"another process is comparing in {folder}: wait for it, or stop it") from error
                time.sleep(0.1)
        yield [file.fileno()]
