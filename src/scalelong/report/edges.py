"""What the page says about learning rates: which runs survive, where the edges are, and what a bad choice costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from .blocks import Block, Chart, Interval, Intervals, Series, Table, Text, View
from .comparison import ArmRun, Comparison, Ratio, Sweep
from .numbers import NOTHING, Band, Points, show, show_estimate, show_factor
from .sections import Album

RATES = "Validation loss at the end for each learning rate; a flat curve forgives a bad choice. Shaded: 95 % interval."
SENSITIVITY = "Expected excess loss over the range of rates (Wortsman et al. 2023): lower is less sensitive."
SURVIVAL = "The share of seeds that survive each learning rate. Shaded: Wilson's 95 % interval."
RATIO = (
    "The edge of the method over that of the baseline, by pairs of the same seed. 1 = no larger, and an interval that "
    "holds 1 shows no difference."
)
EDGES = (
    "Edge: the rate that half of the seeds survive, with its 95 % interval. Safe rate: the largest up to which all do. "
    "Both belong to the length of the runs."
)


SURVIVOR = "Trained and sampled from the same noise: images in the same place can be compared."


def edges(comparison: Comparison, album: Album, warnings: list[str]) -> Sequence[Block]:
    """Survival curves, samples of a survivor and of a failed run, and the ratios of edges with what was found."""
    sweeps = [sweep for sweep in comparison.results.rate_sensitivity if sweep.survival]
    if not sweeps:
        return []
    advice = comparison.results.advice
    views = views_of(comparison, lambda sweep: (sweep.survival.points, sweep.survival.band) if sweep.survival else None)
    ratios = [ratio_row(comparison, sweep, sweep.ratio) for sweep in sweeps if sweep.ratio is not None]
    said = [sweep.sentence for sweep in sweeps if sweep.ratio is None]
    title, x, y, source = "Survival by learning rate", "learning rate", "share that survives", "results.json"
    rows = [edge_cells(comparison, sweep) for sweep in sweeps]
    columns = ("method", "steps", "edge", "safe rate", "lowest mean loss", "at rate")
    return [
        *([Text(advice, "list", said)] if advice else []),
        Chart(title, x, y, views, source, log_x=True, linear=True, key="survival", note=SURVIVAL),
        *survivor_and_failed(comparison, album, warnings),
        *(
            [Intervals("Ratio of edges", "times", ratios, reference=1.0, log=True, key="ratio", note=RATIO)]
            if ratios
            else []
        ),
        Table("Edges", columns, rows, note=EDGES),
    ]


def survivor_and_failed(comparison: Comparison, album: Album, warnings: list[str]) -> Sequence[Block]:
    """Samples of two runs of a seed: one that survives, and one of the baseline that failed, at the same rate if so."""
    drawn = [(one, grids[-1]) for one, run in comparison.begun if (grids := run.samples)]
    alive = [pair for pair in drawn if pair[0].result.status == "finished"]
    failed = [pair for pair in drawn if pair[0].result.status == "failed"]
    same = [(a, b) for a, b in product(alive, failed) if a[0].result.seed == b[0].result.seed]
    if not same:
        return []

    def fitness(pair: tuple[tuple[ArmRun, tuple[str, Path]], ...]) -> tuple[bool, bool, bool]:
        (one, _), (other, _) = pair
        baseline = comparison.results.baseline
        return one.arm.setting == other.arm.setting, other.arm.method == baseline, one.arm.method != baseline

    pictures = []
    for (one, (step, path)), said in zip(max(same, key=fitness), ("survived", "failed"), strict=True):
        setting = comparison.setting_name(one.arm.setting)
        pictures.append((path, f"{one.arm.label}: {said}", ", ".join(filter(None, (setting, one.name, step)))))
    return album.gallery("Samples of a run that survived, and of one that failed", SURVIVOR, pictures, warnings)


def ratio_row(comparison: Comparison, sweep: Sweep, ratio: Ratio) -> Interval:
    label, style = name_of(comparison, sweep), style_of(comparison, sweep)
    return Interval(label, style, ratio, show_factor(ratio), [sweep.sentence], ratio.verdict)


def edge_cells(comparison: Comparison, sweep: Sweep) -> list[str]:
    edge = sweep.edge
    shown = NOTHING
    if edge is not None and edge.value is not None:
        shown = f"{edge.bound or ''} {show_estimate(edge, 3)}".strip()
    numbers = (show(sweep.safe_rate), show_estimate(sweep.best_loss), show(sweep.best_rate))
    return [name_of(comparison, sweep), show(comparison.results.steps), shown, *numbers]


def rates(comparison: Comparison) -> Sequence[Block]:
    """The final losses by learning rate: one view per depth and batch size."""
    sweeps = comparison.results.rate_sensitivity
    if not sweeps:
        return []
    views = views_of(comparison, lambda sweep: (sweep.points, sweep.band), "some failed")
    rows = []
    for sweep in sweeps:
        largest = f"Largest stable rate: {show(sweep.largest_stable_rate)}"
        text = show_estimate(sweep.sensitivity, 3)
        label, style = name_of(comparison, sweep), style_of(comparison, sweep)
        rows.append(Interval(label, style, sweep.sensitivity, text, [largest]))
    title, x, y = "Final loss by learning rate", "learning rate", "validation loss"
    return [
        Chart(title, x, y, views, "results.json", log_x=True, key="rate-loss", note=RATES),
        Intervals("Learning-rate sensitivity", "sensitivity", rows, key="sensitivity", note=SENSITIVITY),
    ]


def views_of(comparison: Comparison, curve: Callable[[Sweep], tuple[Points, Band] | None], gap: str = "") -> list[View]:
    """One view per depth and batch size; `gap` is said of a curve with a missing value."""
    found: dict[str, list[Series]] = {}
    for sweep in comparison.results.rate_sensitivity:
        points, band = curve(sweep) or ([], [])
        ended = gap if any(y is None for _, y in points) else ""
        series = Series(sweep.label, style_of(comparison, sweep), points, band, ended=ended)
        found.setdefault(setting_of(sweep), []).append(series)
    return [View(name, series) for name, series in found.items()]


def setting_of(sweep: Sweep) -> str:
    return ", ".join(filter(None, (sweep.place, f"depth {show(sweep.depth)}, batch {show(sweep.batch)}")))


def name_of(comparison: Comparison, sweep: Sweep) -> str:
    """The method, with its setting where there are several."""
    several = len({setting_of(one) for one in comparison.results.rate_sensitivity}) > 1
    return f"{sweep.label}, {setting_of(sweep)}" if several else sweep.label


def style_of(comparison: Comparison, sweep: Sweep) -> int:
    return next((arm.style for arm in comparison.arms if arm.label == sweep.label), 0)
