"""What may have made a run collapse, and what replays with one change at a time say about it; needs torch only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from ..guard.losses import WINDOW, LossWatch, SpikeDetector

CERTAIN = 0.05
"""The chance, at most, that a change saves so many more replays than none if it does nothing (Fisher's exact test)."""

STAYS = 5
"""Collapsed windows in a row, past the place of the collapse, after which a replay is lost."""

Group = Literal["none", "rate", "optimiser", "clipping", "precision", "data", "module", "scaling"]


NARROWEST: tuple[Group, ...] = ("module", "data", "precision", "optimiser", "scaling", "clipping", "rate")


@dataclass(frozen=True)
class Change:
    """One thing that is different in a replay; `settings` are those of a recipe, of which `lr` is a factor."""

    id: str
    group: Group
    label: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def scaling(self) -> dict[str, Any]:
        """The arguments of `scale_skips`."""
        return {key.removeprefix("scaling."): value for key, value in self.settings.items() if key[:8] == "scaling."}


UNCHANGED = Change("unchanged", "none", "nothing")

CHANGES = (
    Change("lr-half", "rate", "lr × ½", {"optim.lr": 0.5}),
    Change("lr-quarter", "rate", "lr × ¼", {"optim.lr": 0.25}),
    Change("beta2", "optimiser", "β2 = 0.95", {"optim.beta2": 0.95}),
    Change("eps", "optimiser", "ε = 1e-6", {"optim.eps": 1e-6}),
    Change("clip-norm", "clipping", "clip_norm = 1", {"optim.clip_norm": 1.0}),
    Change("adaptive-clip", "clipping", "adaptive_clip = 1.05 (AdaGC)", {"optim.adaptive_clip": 1.05}),
    Change("fp32", "precision", "float32", {"training.precision": "fp32"}),
    Change("order", "data", "another order of the data"),
    Change("batches", "data", "without the batches that stood out"),
    Change("module", "module", "one module as it was earlier"),
    Change("cs", "scaling", "CS, κ = 0.7", {"scaling.method": "cs", "scaling.kappa": 0.7}),
    Change("ls", "scaling", "LS", {"scaling.method": "ls"}),
    Change(
        "after-norm",
        "scaling",
        "CS after the norm",
        {"scaling.method": "cs", "scaling.kappa": 0.7, "scaling.where": "after-norm"},
    ),
)


# One replay


class Judge:
    """Tells from the losses of a replay whether it is saved; the rule of the seat belt, given what was known before.

    `place` is how many losses come before the collapse of the run that is replayed. A replay is lost if it is collapsed
    when it ends, or stays so beyond that place; where the run had not learned before, also if it ends above `limit`.

    >>> judge = Judge(LossWatch(nothing=1.0), place=20)
    >>> [judge.add(loss) for loss in 20 * [0.2] + 99 * [0.9] + [0.9]][-2:], judge.saved
    ([False, True], False)
    """

    def __init__(self, watch: LossWatch, place: int, limit: float = math.inf) -> None:
        self.watch, self.place = watch, place
        self.limit = limit if watch.best is None or watch.best > limit else math.inf
        self.losses: list[float] = []
        self.collapsed = 0
        """Windows in a row."""
        self.states: list[str] = []

    def add(self, loss: float) -> bool:
        """Note the loss of a step; whether the replay is lost by now."""
        self.losses.append(loss)
        if len(self.losses) % WINDOW == 0:
            self.states.append(self.watch.look(self.losses[-WINDOW:]))
            self.collapsed = self.collapsed + 1 if self.states[-1] == "collapsed" else 0
        return self.collapsed >= STAYS and len(self.losses) >= self.place + STAYS * WINDOW

    @property
    def saved(self) -> bool:
        return self.collapsed == 0 and self.loss <= self.limit and math.isfinite(self.loss)

    @property
    def begun(self) -> int | None:
        """How many losses come before the collapse that it ended in: the first window of those that were no longer
        healthy; None if it was saved."""
        if self.saved:
            return None
        healthy = [number for number, state in enumerate(self.states, start=1) if state == "healthy"]
        return WINDOW * healthy[-1] if healthy else 0

    @property
    def loss(self) -> float:
        """The mean of the last window."""
        return fmean(self.losses[-WINDOW:]) if self.losses else math.nan


def outliers(losses: Sequence[float], begun: int) -> tuple[int, ...]:
    """The places of the first losses that stood out, until shortly after the collapse had begun: then all do."""
    detector = SpikeDetector(window=2 * WINDOW)
    seen = list(enumerate(losses[: begun + WINDOW]))
    return tuple([n for n, loss in seen if detector.update(n, loss) is not None or not math.isfinite(loss)][:WINDOW])


# All replays


@dataclass(frozen=True)
class Tally:
    """How many replays of a change were saved, and the mean loss that those ended with."""

    change: Change
    saved: int = 0
    of: int = 0
    loss: float | None = None

    def __str__(self) -> str:
        return f"{self.saved} of {self.of}"


@dataclass(frozen=True)
class Verdict:
    """What the replays say. `groups` are those that save the run, narrowest first, and `best` the change to go on with.

    A smaller rate or clipped gradients help against much; that a single module or a few batches do says more.
    """

    kind: Literal["named", "several", "none", "chance"]
    groups: tuple[Group, ...]
    best: Change | None
    sentence: str


def chance_of(saved: int, of: int, saved_unchanged: int, of_unchanged: int) -> float:
    """How likely at least so many saved replays are if the change does nothing: Fisher's exact test, one-sided.

    >>> round(chance_of(4, 4, 0, 4), 4), round(chance_of(4, 4, 1, 4), 4)
    (0.0143, 0.0714)
    """
    total, all_saved = of + of_unchanged, saved + saved_unchanged
    ways = [
        math.comb(all_saved, k) * math.comb(total - all_saved, of - k) for k in range(saved, min(of, all_saved) + 1)
    ]
    return sum(ways) / math.comb(total, of)


def saves(tally: Tally, unchanged: Tally) -> bool:
    """Whether a change saves the run in clearly more replays than none."""
    return tally.of > 0 and chance_of(tally.saved, tally.of, unchanged.saved, unchanged.of) <= CERTAIN


def is_open(tally: Tally, unchanged: Tally, replays: int) -> bool:
    """Whether more replays of a change, up to so many, could tell: it does not save the run clearly yet, and would if
    all the others were saved."""
    rest = replays - tally.of
    would = Tally(tally.change, tally.saved + rest, replays)
    return rest > 0 and not saves(tally, unchanged) and saves(would, unchanged)


def conclude(tallies: Iterable[Tally]) -> Verdict:
    """What saves the run, what does not, and what to do; the first tally is that of the unchanged replays."""
    unchanged, *changed = tallies
    good = [tally for tally in changed if saves(tally, unchanged)]
    groups: tuple[Group, ...] = tuple(
        group for group in NARROWEST if any(tally.change.group == group for tally in good)
    )
    # Of all that save it, the one that learns best.
    best = min(good, key=lambda tally: math.inf if tally.loss is None else tally.loss, default=None)
    share = f"{unchanged} replays with nothing changed survive"
    rest = [tally.change.label for tally in changed if tally.of and tally.change.group not in groups]
    others = f" Not clearly: {', '.join(rest)}." if rest else ""
    if 2 * unchanged.saved >= unchanged.of and unchanged.saved:
        more = f" Still more survive with {listed(good)}." if good else " No change is clearly better."
        return Verdict("chance", groups, best and best.change, f"The collapse was chance: {share}.{more}")
    if not good:
        tried = [tally for tally in changed if tally.saved]
        hint = f" Most with {listed([max(tried, key=lambda tally: tally.saved / tally.of)])}." if tried else ""
        return Verdict("none", (), None, f"Nothing that was tried saves the run clearly: {share}.{hint}")
    some = f" ({share})"
    if len(groups) == 1:
        said = f"Only a change of the {groups[0]} saves the run{some}: {listed(good)}.{others}"
        return Verdict("named", groups, best and best.change, said)
    said = f"Changes of {len(groups)} kinds save the run{some}, so that no single cause can be named: {listed(good)}."
    said += f" The narrowest of them is the {groups[0]}."
    return Verdict("several", groups, best and best.change, said + others)


def listed(tallies: Iterable[Tally]) -> str:
    return "; ".join(f"{tally.change.label} ({tally})" for tally in tallies)
