"""A comparison's folder as the page sees it: results.json, and the folders of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .blocks import STYLES, Line, Series
from .numbers import Points
from .read import Notes, as_dict, as_dicts, as_list, as_text, finite, read_dict, whole
from .runs import RunFolder, is_run, read_run

RESULTS, PLAN = "results.json", "comparison.json"

# So that a method has the same colour on every page; 0 is the grey of the baseline.
PREFERRED = {"none": 0, "cs": 1, "ls": 2, "uniform": 4, "cs-reversed": 3}


@dataclass(frozen=True)
class ArmRun:
    """One seed of an arm."""

    name: str
    seed: int | None
    status: str
    folder: Path | None
    content: dict[str, Any]

    @property
    def short_name(self) -> str:
        """Without the arm, where its name is there already."""
        return self.name if self.seed is None else f"seed {self.seed}"


@dataclass(frozen=True)
class Arm:
    """One method in one setting."""

    key: str
    label: str
    setting: str
    style: int
    runs: Sequence[ArmRun]
    content: dict[str, Any]

    @property
    def finished(self) -> int:
        return sum(run.status == "finished" for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    folder: Path
    content: dict[str, Any]
    arms: Sequence[Arm]
    kappa: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def recipe(self) -> str:
        return as_text(self.content.get("recipe"), self.folder.name)

    @property
    def baseline(self) -> str:
        return as_text(self.content.get("baseline"), "none")

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(arm.setting for arm in self.arms))

    @property
    def running(self) -> bool:
        return self.content.get("status") not in ("finished", "incomplete")

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for arm in self.arms for run in arm.runs if run.seed is not None})

    @property
    def fd_name(self) -> str:
        """What the distance of samples is called; it depends on the network that measured it."""
        names = (as_text(as_dict(arm.content.get("fd_curve")).get("name")) for arm in self.arms)
        return next((name for name in names if name), "FD")

    def setting_name(self, setting: str) -> str:
        """What tells a setting from the others: empty where there is one only."""
        parts = [set(one.split(", ")) for one in self.settings]
        shared = set.intersection(*parts) if parts else set()
        return ", ".join(part for part in setting.split(", ") if part not in shared)

    def name_of(self, arm: Arm) -> str:
        """The arm's label, with its setting where there are several."""
        setting = self.setting_name(arm.setting)
        return f"{arm.label}, {setting}" if setting else arm.label

    def arm(self, key: str) -> Arm | None:
        return next((arm for arm in self.arms if arm.key == key), None)

    def count(self, status: str) -> int:
        return sum(run.status == status for arm in self.arms for run in arm.runs)


Folders = Sequence[tuple[Arm, ArmRun, RunFolder]]


def is_comparison(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RESULTS, PLAN))


def read_comparison(folder: Path) -> Comparison:
    notes = Notes()
    content = read_dict(folder / RESULTS, notes)
    if not content:
        notes.add(f"{RESULTS} is missing or broken: only the plan and the runs themselves are shown.")
    plan = read_dict(folder / PLAN, notes)
    content = {**{key: plan[key] for key in ("recipe", "description", "command", "steps") if key in plan}, **content}
    arms = read_arms(folder, as_dicts(content.get("arms")), notes) or arms_of_folders(folder)
    kappa = read_dict(folder / "kappa.json", notes)
    return Comparison(folder, content, arms, kappa, tuple(notes.lines))


def read_arms(folder: Path, contents: Sequence[dict[str, Any]], notes: Notes) -> list[Arm]:
    styles = choose_styles(contents)
    arms = []
    for place, content in enumerate(contents):
        key = as_text(content.get("id"), f"arm {place + 1}")
        label, setting = as_text(content.get("label"), key), as_text(content.get("setting"))
        runs = [read_arm_run(folder, label, run, notes) for run in as_dicts(content.get("runs"))]
        arms.append(Arm(key, label, setting, styles[place], runs, content))
    return arms


def choose_styles(contents: Sequence[dict[str, Any]]) -> list[int]:
    """A style for each method with its options, the same in every setting; a known method has its own if it is free."""
    chosen: dict[str, int] = {}
    for content in contents:
        name = f"{content.get('method')} {content.get('options')}"
        if name not in chosen:
            free = [style for style in range(1, STYLES) if style not in chosen.values()]
            preferred = PREFERRED.get(as_text(content.get("method")), -1)
            is_free = preferred in free or (preferred == 0 and 0 not in chosen.values())
            chosen[name] = preferred if is_free else free[0] if free else len(chosen)
    return [chosen[f"{content.get('method')} {content.get('options')}"] for content in contents]


def read_arm_run(folder: Path, label: str, content: dict[str, Any], notes: Notes) -> ArmRun:
    seed, given = whole(content.get("seed")), as_text(content.get("folder"))
    place = folder / given if given else None
    if place is not None and not place.resolve().is_relative_to(folder.resolve()):
        # A results.json of a stranger must not put other files of this machine on the page.
        notes.add(f"{RESULTS} names a folder outside of the comparison, which is not read: {given}")
        place = None
    name = f"{label}, seed {seed}" if seed is not None else label
    return ArmRun(name, seed, as_text(content.get("status"), "unknown"), place, content)


def arms_of_folders(folder: Path) -> list[Arm]:
    """Where there are no results yet: the runs that lie in the folder."""
    arms = []
    for place, arm in enumerate(sorted(path for path in folder.glob("runs/*") if path.is_dir())):
        runs = [
            ArmRun(f"{arm.name}, {run.name}", None, "unknown", run, {}) for run in sorted(arm.iterdir()) if is_run(run)
        ]
        if runs:
            arms.append(Arm(arm.name, arm.name, "", PREFERRED.get(arm.name, place + 1), runs, {}))
    return arms


def run_folders(comparison: Comparison) -> list[tuple[Arm, ArmRun, RunFolder]]:
    """The folders of the runs that have begun."""
    return [
        (arm, run, read_run(run.folder, run.name))
        for arm in comparison.arms
        for run in arm.runs
        if run.folder is not None and is_run(run.folder)
    ]


def curve_series(arm: Arm, name: str) -> Series:
    """A curve of results.json with its band and its runs."""
    curve = as_dict(arm.content.get(name))
    lost = as_dict(arm.content.get("diverged"))
    ended = "diverged" if finite(lost.get("count")) else ""
    runs = [run for run in arm.runs if run.seed is not None]
    members = [
        Line(runs[place].short_name if place < len(runs) else f"run {place + 1}", points_of(curve, "steps", values))
        for place, values in enumerate(as_list(curve.get("runs")))
    ]
    mean = points_of(curve, "steps", curve.get("mean"))
    # As long as a seed is missing there is no mean, and the runs stand for themselves.
    known = mean if any(y is not None for _, y in mean) else []
    return Series(arm.label, arm.style, known, band_of(curve, "steps"), members, ended)


def points_of(curve: dict[str, Any], x: str, values: Any) -> Points:
    pairs = zip(as_list(curve.get(x)), as_list(values), strict=False)
    return [(place, finite(value)) for step, value in pairs if (place := finite(step)) is not None]


def band_of(curve: dict[str, Any], x: str) -> list[tuple[float, float, float]]:
    ends = zip(as_list(curve.get(x)), as_list(curve.get("low")), as_list(curve.get("high")), strict=False)
    found = [(finite(place), finite(low), finite(high)) for place, low, high in ends]
    return [(x, low, high) for x, low, high in found if x is not None and low is not None and high is not None]
