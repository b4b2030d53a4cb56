"""A comparison as the page sees it: results.json as it was written, and the folders of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from .blocks import STYLES
from .numbers import Band, Estimate, Finite, Points
from .runs import Environment, Kappa, Run, is_run, read_json, read_run

RESULTS, PLAN = "results.json", "comparison.json"

# So that a method has the same colour on every page; 0 is the grey of the baseline.
PREFERRED = {"none": 0, "cs": 1, "ls": 2, "uniform": 4, "cs-reversed": 3}


@dataclass(frozen=True)
class Curve:
    """A mean with its band, and the runs behind it."""

    x: Annotated[tuple[float, ...], Field(validation_alias=AliasChoices("steps", "index", "sigma", "rates"))]
    mean: Annotated[tuple[Finite, ...], Field(validation_alias=AliasChoices("mean", "losses"))] = ()
    low: tuple[Finite, ...] = ()
    high: tuple[Finite, ...] = ()
    runs: tuple[tuple[Finite, ...], ...] = ()
    name: str = "FD"
    """What the distance of samples is called; it depends on the network that measured it."""

    @property
    def points(self) -> Points:
        return list(zip(self.x, self.mean, strict=False))

    @property
    def band(self) -> Band:
        ends = zip(self.x, self.low, self.high, strict=False)
        return [(x, low, high) for x, low, high in ends if low is not None and high is not None]


@dataclass(frozen=True)
class OscillationCurve:
    steps: tuple[float, ...]
    feature: tuple[Finite, ...] = ()
    gradient: tuple[Finite, ...] = ()


@dataclass(frozen=True)
class Share:
    """How many of the runs that ended have failed."""

    count: int
    of: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class RunResult:
    seed: int | None
    folder: str
    status: str = "unknown"
    cause: str | None = None
    """Why it failed: not finite, given up, or did not learn."""
    step: int | None = None
    seconds: Finite = None
    seconds_per_step: Finite = None
    final_loss: float | None = None
    final_fd: float | None = None
    message: str | None = None


@dataclass(frozen=True)
class Arm:
    """One method in one setting."""

    id: str
    label: str
    setting: str = ""
    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    runs: tuple[RunResult, ...] = ()
    final_loss: Estimate | None = None
    final_fd: Estimate | None = None
    loss_curve: Curve | None = None
    fd_curve: Curve | None = None
    oscillation: dict[str, Estimate | None] | None = None
    oscillation_curve: OscillationCurve | None = None
    failed: Share | None = None
    coefficients: Curve | None = None
    noise_robustness: Curve | None = None
    style: int = 0
    """The colour on the page; not in the file."""


@dataclass(frozen=True)
class Pair:
    """A method against the baseline."""

    arm: str
    baseline: str
    setting: str
    verdict: str
    speedup_steps: Estimate = Estimate()
    sentence: str = ""
    sentence_seconds: str = ""
    final_loss: Estimate | None = None
    final_fd: Estimate | None = None
    oscillation: Estimate | None = None


@dataclass(frozen=True)
class Ratio(Estimate):
    """An edge over that of the baseline."""

    verdict: str = ""


@dataclass(frozen=True)
class Sweep(Curve):
    """The runs of a method at several learning rates: its final losses, which of them survive, and its edge."""

    label: str = ""
    place: str = ""
    depth: int | None = None
    batch: int | None = None
    sensitivity: Estimate = Estimate()
    largest_stable_rate: float | None = None
    survival: Curve | None = None
    edge: Estimate | None = None
    ratio: Ratio | None = None
    safe_rate: float | None = None
    best_rate: float | None = None
    best_loss: Estimate | None = None
    sentence: str = ""


@dataclass(frozen=True)
class AtWidth(Curve):
    """The losses over the rates at a width, and the best rate there."""

    width: int = 0
    best: Estimate = Estimate()


@dataclass(frozen=True)
class Family:
    """The widths of a parametrization, and how far the best rate moves from the first to the last."""

    label: str
    widths: tuple[AtWidth, ...]
    shift: Estimate
    sentence: str


@dataclass(frozen=True)
class Carried:
    sentence: str


@dataclass(frozen=True)
class Transfer:
    """Whether the best rate of a method is the same at every width."""

    label: str
    families: tuple[Family, ...]
    carried: Carried
    advice: str


@dataclass(frozen=True)
class Plan:
    """What comparison.json and results.json both say."""

    recipe: str = ""
    description: str = ""
    command: str = ""
    steps: int | None = None


@dataclass(frozen=True)
class Results(Plan):
    """results.json."""

    status: str = "running"
    runs_done: int = 0
    runs_total: int = 0
    created: str | None = None
    updated: str | None = None
    environment: Environment = Environment()
    baseline: str = "none"
    parameters: dict[str, int] = field(default_factory=dict)
    arms: tuple[Arm, ...] = ()
    comparisons: tuple[Pair, ...] = ()
    rate_sensitivity: tuple[Sweep, ...] = ()
    edge_rates: tuple[float, ...] = ()
    transfer: tuple[Transfer, ...] | None = None
    advice: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArmRun:
    """One run of an arm: what the results say of it, its name without the arm, and its folder if it has begun."""

    arm: Arm
    result: RunResult
    name: str
    run: Run | None


@dataclass(frozen=True)
class Comparison:
    folder: Path
    results: Results
    runs: Sequence[ArmRun]
    kappa: Kappa | None
    warnings: Sequence[str]

    @property
    def arms(self) -> Sequence[Arm]:
        return self.results.arms

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

    def arm(self, key: str) -> Arm:
        """That of the results; one that they lack is called by its key."""
        return next((arm for arm in self.arms if arm.id == key), Arm(key, key))


def is_comparison(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RESULTS, PLAN))


def read_comparison(folder: Path) -> Comparison:
    warnings: list[str] = []
    results = read_json(folder / RESULTS, Results, None, warnings)
    plan = read_json(folder / PLAN, Plan, Plan(), warnings)
    if results is None:
        warnings.append(f"{RESULTS} is missing or broken: only the plan and the runs themselves are shown.")
        arms = tuple(arms_of_folders(folder))
        results = Results(**asdict(plan), arms=arms, runs_total=sum(len(arm.runs) for arm in arms))
    results = replace(results, recipe=results.recipe or folder.name, arms=with_styles(results.arms))
    runs = [read_arm_run(folder, arm, result, warnings) for arm in results.arms for result in arm.runs]
    kappa = read_json(folder / "kappa.json", Kappa, None, warnings)
    return Comparison(folder, results, runs, kappa, warnings)


def read_arm_run(folder: Path, arm: Arm, result: RunResult, warnings: list[str]) -> ArmRun:
    place, run = folder / result.folder, None
    name = place.name if result.seed is None else f"seed {result.seed}"
    if not place.resolve().is_relative_to(folder.resolve()):
        # A results.json of a stranger must not put other files of this machine on the page.
        warnings.append(f"{RESULTS} names a folder outside of the comparison, which is not read: {result.folder}")
    elif is_run(place):
        run = read_run(place, f"{arm.label}, {name}")
    return ArmRun(arm, result, name, run)


def arms_of_folders(folder: Path) -> list[Arm]:
    """Where there are no results yet: the runs that lie in the folder."""
    arms = []
    for place in sorted(path for path in folder.glob("runs/*") if path.is_dir()):
        runs = [RunResult(None, str(run.relative_to(folder))) for run in sorted(place.iterdir()) if is_run(run)]
        arms += [Arm(place.name, place.name, method=place.name, runs=tuple(runs))] if runs else []
    return arms


def with_styles(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """A style for a method with its options, the same in every setting: its preferred one if that is free."""
    chosen: dict[str, int] = {}
    for arm in arms:
        preferred = PREFERRED.get(arm.method, -1)
        free = [style for style in (preferred, *range(1, STYLES)) if style not in (-1, *chosen.values())]
        chosen.setdefault(f"{arm.method} {arm.options}", free[0] if free else len(chosen))
    return tuple(replace(arm, style=chosen[f"{arm.method} {arm.options}"]) for arm in arms)
