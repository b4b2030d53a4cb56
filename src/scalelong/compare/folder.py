"""The comparison's folder: its plan, which may grow but not change."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..monitor.readings import with_nulls
from ..runs.run_dir import Run, check_folder, flatten
from ..utils.atomic import replace_text
from .grid import Plan, PlanError

FILE = "comparison.json"
VERSION = 1
HINT = ": give the same command to resume, more seeds or methods to extend it, or another --out"


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, content: Any) -> None:
    """A JSON file that is complete or, as before, the old one; a number that is not finite is null."""
    replace_text(path, json.dumps(with_nulls(content), indent=1) + "\n")


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as JSON, with every arm's resolved recipe."""
    arms = [
        {"id": arm.id, "label": arm.label, "setting": arm.setting, "config": arm.config.model_dump(mode="json")}
        for arm in plan.arms
    ]
    seeds = list(plan.seeds)
    return {"version": VERSION, "recipe": plan.recipe, "seeds": seeds, "baseline": plan.baseline.id, "arms": arms}


def save_plan(folder: Path, plan: Plan, command: str) -> str:
    """Write what is compared, if the folder is free for it; returns when the comparison was first begun."""
    check_plan(folder, plan)
    created = read_plan(folder).get("created") or now()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, {"created": created, "command": command, **describe_plan(plan)})
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
    before, now = read_plan(folder), describe_plan(plan)
    if not before:
        if Run(folder).exists:
            raise PlanError(f"{folder} is the folder of a single run: choose another --out")
        check_folder(Run(folder))
        return
    arms = {arm["id"]: flatten(arm["config"]) for arm in now["arms"]}
    for arm in before["arms"]:
        if arm["id"] not in arms:
            raise PlanError(f"{folder} holds a comparison with {arm['id']}, which is not asked for now{HINT}")
        old, new = flatten(arm["config"]), arms[arm["id"]]
        changed = [f"{key} {old.get(key)} → {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]
        if changed:
            shown = ", ".join(changed[:4])
            raise PlanError(f"{folder} holds a comparison with other settings of {arm['id']} ({shown}){HINT}")
    if not set(before["seeds"]) <= set(plan.seeds):
        raise PlanError(f"{folder} holds a comparison with {len(before['seeds'])} seeds, now {len(plan.seeds)}{HINT}")
    if before["baseline"] != now["baseline"]:
        raise PlanError(f"{folder} compares with {before['baseline']}, not with {now['baseline']}{HINT}")
