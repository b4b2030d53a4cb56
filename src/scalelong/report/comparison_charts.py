"""The charts of a comparison: one series per method, one view per setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .blocks import Block, Chart, Interval, Intervals, Line, Series, Text, View
from .common import cs_area
from .comparison import Arm, Comparison, Folders, band_of, curve_series, points_of
from .numbers import show, show_estimate, thin
from .read import Estimate, as_dict, as_dicts, as_text

OSCILLATION = "Mean over blocks, skips and seeds; 0 = does not move, 1 = jumps between 1 and 3 (Fig. 1)."
NOISE = "The error of the trained network when its inputs get extra noise; lower and flatter is better (Fig. 3c)."
RATES = "Validation loss at the end for each learning rate; a flat curve forgives a bad choice. Shaded: 95 % interval."
SENSITIVITY = "Expected excess loss over the range of rates (Wortsman et al. 2023): lower is less sensitive."


def by_setting(comparison: Comparison, make: Callable[[Arm], Series]) -> list[View]:
    """One view per setting, with the arms that have something to show."""
    views = []
    for setting in comparison.settings:
        series = [make(arm) for arm in comparison.arms if arm.setting == setting]
        known = [one for one in series if not one.empty]
        views += [View(comparison.setting_name(setting), known)] if known else []
    return views


def curves(key: str, comparison: Comparison, folders: Folders) -> list[Block]:
    losses = by_setting(comparison, lambda arm: curve_series(arm, "loss_curve"))
    fds = by_setting(comparison, lambda arm: curve_series(arm, "fd_curve"))
    note, name = "EMA weights (EMA). Shaded: 95 % interval of the mean over seeds.", comparison.fd_name
    lower = f"Lower is better. {note}"
    charts = [
        Chart(f"{key}-validation", "Validation loss", "step", "validation loss", losses, note, "curves.csv"),
        Chart(f"{key}-fd", f"{name} of samples", "step", name, fds, lower, "curves.csv", half=True),
        training_chart(f"{key}-train", comparison, folders),
    ]
    shown = [chart for chart in charts if not chart.empty]
    return list(shown) or [Text(["No run has numbers yet."], "empty")]


def training_chart(key: str, comparison: Comparison, folders: Folders) -> Chart:
    """Every run by itself as its metrics.jsonl has it, so that a running comparison can be watched."""
    most = max(40, min(200, 12_000 // max(1, len(folders))))

    def series(arm: Arm) -> Series:
        own = [(run, folder) for one, run, folder in folders if one is arm]
        lines = [Line(run.short_name, thin(folder.series("loss"), most)) for run, folder in own]
        lost = any(folder.state == "diverged" for _, folder in own)
        return Series(arm.label, arm.style, members=lines, ended="diverged" if lost else "")

    title, note = "Training loss of every run", "One line per run: the mean loss of the steps since the last point."
    return Chart(
        key, title, "step", "training loss", by_setting(comparison, series), note, "runs/*/*/metrics.jsonl", half=True
    )


def oscillation(key: str, comparison: Comparison) -> list[Block]:
    made: list[Chart | Intervals] = []
    for name in ("feature", "gradient"):
        views = by_setting(comparison, lambda arm, name=name: oscillation_series(arm, name))
        title, y = f"Oscillation of {name}s", "oscillation index"
        made.append(Chart(f"{key}-osc-{name}", title, "step", y, views, OSCILLATION, "results.json", half=True))
    for name in ("feature", "gradient"):
        rows = [oscillation_row(comparison, arm, name) for arm in comparison.arms]
        title, note = f"Oscillation of {name}s over the whole run", "Mean over seeds and its 95 % interval."
        made.append(Intervals(f"{key}-osc-mean-{name}", title, "oscillation index", rows, note, half=True))
    shown: list[Block] = [one for one in made if not one.empty]
    nothing = "Not measured yet." if comparison.running else "The skips were not watched in these runs."
    return shown or [Text([nothing], "empty")]


def oscillation_series(arm: Arm, name: str) -> Series:
    curve = as_dict(arm.content.get("oscillation_curve"))
    return Series(arm.label, arm.style, thin(points_of(curve, "steps", curve.get(name)), 300))


def oscillation_row(comparison: Comparison, arm: Arm, name: str) -> Interval:
    estimate = Estimate.of(as_dict(arm.content.get("oscillation")).get(name))
    return Interval(comparison.name_of(arm), arm.style, estimate, show_estimate(estimate, 3))


def arm_series(arm: Arm, name: str, x: str) -> Series:
    """A mean with its band, from the results of an arm."""
    found = as_dict(arm.content.get(name))
    return Series(arm.label, arm.style, points_of(found, x, found.get("mean")), band_of(found, x))


def coefficients(key: str, comparison: Comparison) -> list[Block]:
    views = by_setting(comparison, lambda arm: arm_series(arm, "coefficients", "index"))
    if not views:
        return []
    count = max(int(x) for view in views for one in view.series for x, _ in one.points)
    views = [replace(view, area=cs_area(comparison.kappa, count)) for view in views]
    title, x = "Coefficient of each skip (Fig. 7)", "skip, 1 = outermost"
    note = "At the end of training; for learned methods the mean over seeds and its 95 % interval."
    return [Chart(f"{key}-coef", title, x, "κᵢ", views, note, "results.json", linear=True)]


def noise(key: str, comparison: Comparison) -> list[Block]:
    views = by_setting(comparison, lambda arm: arm_series(arm, "noise_robustness", "sigma"))
    title, x = "Error under extra noise", "standard deviation of the extra noise"
    return [Chart(f"{key}-noise-error", title, x, "error", views, NOISE, "results.json")] if views else []


def rates(key: str, comparison: Comparison) -> list[Block]:
    found = as_dicts(comparison.content.get("rate_sensitivity"))
    if not found:
        return []
    names = [f"depth {show(one.get('depth'))}, batch {show(one.get('batch'))}" for one in found]
    series = [rate_series(comparison, one) for one in found]
    views = [
        View(name, [one for other, one in zip(names, series, strict=True) if other == name])
        for name in dict.fromkeys(names)
    ]
    rows = [
        rate_row(one, content, f"{one.name}, {name}" if len(views) > 1 else one.name)
        for one, content, name in zip(series, found, names, strict=True)
    ]
    title, y = "Final loss by learning rate", "validation loss"
    return [
        Chart(f"{key}-rate-loss", title, "learning rate", y, views, RATES, "results.json", log_x=True),
        Intervals(f"{key}-sensitivity", "Learning-rate sensitivity", "sensitivity", rows, SENSITIVITY),
    ]


def rate_series(comparison: Comparison, content: dict[str, Any]) -> Series:
    label = as_text(content.get("label"), as_text(content.get("method")))
    style = next((arm.style for arm in comparison.arms if arm.label == label), 0)
    points = points_of(content, "rates", content.get("losses"))
    lost = "some diverged" if any(y is None for _, y in points) else ""
    return Series(label, style, points, band_of(content, "rates"), ended=lost)


def rate_row(series: Series, content: dict[str, Any], label: str) -> Interval:
    estimate = Estimate.of(content.get("sensitivity"))
    largest = f"Largest stable rate: {show(content.get('largest_stable_rate'))}"
    return Interval(label, series.style, estimate, show_estimate(estimate, 3), largest)
