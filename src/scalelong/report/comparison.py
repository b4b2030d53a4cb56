"""A comparison's folder as the page sees it: results.json, and the folders of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .blocks import STYLES
from .read import Arm, Kappa, Plan, Results, RunResult, read_json
from .runs import Run, is_run, read_kappa, read_run

RESULTS, PLAN = "results.json", "comparison.json"

# So that a method has the same colour on every page; 0 is the grey of the baseline.
PREFERRED = {"none": 0, "cs": 1, "ls": 2, "uniform": 4, "cs-reversed": 3}


@dataclass(frozen=True)
class ArmRun:
    """One run of an arm: what the results say of it, and its folder if it has begun."""

    arm: Arm
    result: RunResult
    run: Run | None

    @property
    def name(self) -> str:
        """Without the arm."""
        return Path(self.result.folder).name if self.result.seed is None else f"seed {self.result.seed}"

    @property
    def label(self) -> str:
        return f"{self.arm.label}, {self.name}"


@dataclass(frozen=True)
class Comparison:
    folder: Path
    results: Results
    runs: Sequence[ArmRun]
    styles: dict[str, int]
    kappa: Kappa | None
    warnings: tuple[str, ...]

    @property
    def arms(self) -> Sequence[Arm]:
        return self.results.arms

    @property
    def recipe(self) -> str:
        return self.results.recipe or self.folder.name

    @property
    def running(self) -> bool:
        return self.results.status not in ("finished", "incomplete")

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(arm.setting for arm in self.arms))

    @property
    def seeds(self) -> list[int]:
        return sorted({run.result.seed for run in self.runs if run.result.seed is not None})

    @property
    def begun(self) -> list[tuple[ArmRun, Run]]:
        """The runs that have a folder."""
        return [(one, one.run) for one in self.runs if one.run is not None]

    @property
    def fd_name(self) -> str:
        return next((arm.fd_curve.name for arm in self.arms if arm.fd_curve), "FD")

    def setting_name(self, setting: str) -> str:
        """What tells a setting from the others: empty where there is one only."""
        parts = [set(one.split(", ")) for one in self.settings]
        shared = set.intersection(*parts) if parts else set()
        return ", ".join(part for part in setting.split(", ") if part not in shared)

    def name_of(self, arm: Arm) -> str:
        """The arm's label, with its setting where there are several."""
        return ", ".join(part for part in (arm.label, self.setting_name(arm.setting)) if part)

    def label_of(self, key: str) -> str:
        return next((arm.label for arm in self.arms if arm.id == key), key)

    def count(self, *statuses: str) -> int:
        return sum(run.result.status in statuses for run in self.runs)


def is_comparison(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RESULTS, PLAN))


def read_comparison(folder: Path) -> Comparison:
    warnings: list[str] = []
    results = read_json(folder / RESULTS, Results, None, warnings)
    plan = read_json(folder / PLAN, Plan, Plan(), warnings)
    if results is None:
        warnings.append(f"{RESULTS} is missing or broken: only the plan and the runs themselves are shown.")
        results = Results(**asdict(plan), arms=tuple(arms_of_folders(folder)))
    runs = [read_arm_run(folder, arm, result, warnings) for arm in results.arms for result in arm.runs]
    kappa = read_kappa(folder, warnings)
    return Comparison(folder, results, runs, choose_styles(results.arms), kappa, tuple(warnings))


def read_arm_run(folder: Path, arm: Arm, result: RunResult, warnings: list[str]) -> ArmRun:
    place = folder / result.folder
    found = ArmRun(arm, result, None)
    if not place.resolve().is_relative_to(folder.resolve()):
        # A results.json of a stranger must not put other files of this machine on the page.
        warnings.append(f"{RESULTS} names a folder outside of the comparison, which is not read: {result.folder}")
        return found
    return ArmRun(arm, result, read_run(place, found.label)) if is_run(place) else found


def arms_of_folders(folder: Path) -> list[Arm]:
    """Where there are no results yet: the runs that lie in the folder."""
    arms = []
    for place in sorted(path for path in folder.glob("runs/*") if path.is_dir()):
        runs = [RunResult(None, str(run.relative_to(folder))) for run in sorted(place.iterdir()) if is_run(run)]
        arms += [Arm(place.name, place.name, method=place.name, runs=tuple(runs))] if runs else []
    return arms


def choose_styles(arms: Sequence[Arm]) -> dict[str, int]:
    """A style for each arm: one for a method with its options in every setting, its preferred one if that is free."""
    chosen: dict[str, int] = {}
    names = {arm.id: f"{arm.method} {arm.options}" for arm in arms}
    for arm in arms:
        preferred = PREFERRED.get(arm.method, -1)
        free = [style for style in (preferred, *range(1, STYLES)) if style not in (-1, *chosen.values())]
        chosen.setdefault(names[arm.id], free[0] if free else len(chosen))
    return {key: chosen[name] for key, name in names.items()}
