"""Write docs/results.md and its figures from the small files of docs/results, which benchmarks/map.py leaves.

python docs/make_results.py        # replaces what stands between the comments of the page; seconds
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from scalelong.compare.survival import Edge, RateTable, edge_ratio

DOCS = Path(__file__).parent
PAGE, MAP, FIGURES = DOCS / "results.md", DOCS / "results" / "map", DOCS / "figures"

METHODS = {"uniform": "1/√2", "cs": "CS 0.7", "ls": "LS", "cs-reversed": "CS reversed"}
LABELS = {"none": "none", **METHODS}
COLOURS = {"none": "#666666", "uniform": "#009E73", "cs": "#D55E00", "ls": "#0072B2", "cs-reversed": "#B07A00"}
RECIPES = {"cifar10-deep": "CIFAR-10 at 16 px", "digits-deep": "digits at 8 px"}
AXES = {
    "std": ("initial scale", "standard deviation of the initial weights", "map-initial-scale.png"),
    "depth": ("depth", "depth (blocks); N is half of it", "map-depth.png"),
}
OWN_STD, OWN_DEPTH = "0.0653", "20"  # Of both recipes, whose own cell is named by its initial scale.
NOT_RUN = "not run"


@dataclass(frozen=True)
class Cell:
    """One setting, and the search for the edge of each method that was tried in it."""

    name: str
    units: Mapping[str, Mapping[str, Any]]

    @cached_property
    def tables(self) -> dict[str, RateTable]:
        return {method: table_of(unit) for method, unit in self.units.items()}

    def edge(self, method: str) -> Edge | None:
        return self.tables[method].edge if method in self.tables else None

    def ratio(self, method: str) -> Edge | None:
        """The edge of a method over that of the unscaled network."""
        known = method in self.tables and "none" in self.tables
        return edge_ratio(self.tables[method], self.tables["none"]) if known else None


def table_of(unit: Mapping[str, Any]) -> RateTable:
    rows = zip(unit["survived"], unit["losses"], strict=True)
    survived, losses = zip(*((tuple(map(bool, flags)), tuple(values)) for flags, values in rows), strict=True)
    return RateTable(tuple(unit["seeds"]), tuple(unit["rates"]), survived, losses)


def read_cells(folder: Path = MAP) -> dict[str, Cell]:
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*/*.json")):
        unit = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(unit["cell"], {})[unit["method"]] = unit
    return {name: Cell(name, units) for name, units in found.items()}


def along(cells: Mapping[str, Cell], recipe: str, axis: str) -> dict[str, Cell]:
    """The cells of a recipe that differ in their initial scale ("std") or depth, by its value, the smallest first."""
    found = {name.removeprefix(f"{recipe}-{axis}"): cell for name, cell in cells.items()}
    found = {value: cell for value, cell in found.items() if re.fullmatch(r"[\d.]+", value)}
    if axis == "depth" and (own := cells.get(f"{recipe}-std{OWN_STD}")):
        found[OWN_DEPTH] = own
    return dict(sorted(found.items(), key=lambda item: float(item[0])))


def show_edge(edge: Edge | None) -> str:
    if edge is None:
        return NOT_RUN
    if edge.value is None:
        return "cannot be told"
    text = f"{edge.bound or ''} {edge.value:.3g}".strip()
    return text if edge.low is None else f"{text} ({edge.low:.3g} to {edge.high:.3g})"


def show_ratio(ratio: Edge | None) -> str:
    if ratio is None:
        return NOT_RUN
    if ratio.value is None:
        return "cannot be told"
    text = f"{ratio.value:.2f}×" if ratio.low is None else f"{ratio.value:.2f}× ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"**{text}**" if ratio.verdict in ("larger", "smaller") else text


def show_best(cell: Cell, method: str) -> str:
    """The lowest mean of final validation losses among the rates that all seeds survive, and that rate."""
    best = cell.tables[method].best if method in cell.tables else None
    return NOT_RUN if method not in cell.tables else "–" if best is None else f"{best[1].value:.4f} at {best[0]:.3g}"


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else f"{NOT_RUN.capitalize()}."


def ratios_table(first: str, cells: Mapping[str, Cell], methods: Sequence[str]) -> str:
    columns = [first, "edge of none", *(f"{METHODS[method]} / none" for method in methods)]
    rows = [
        [value, show_edge(cell.edge("none")), *(show_ratio(cell.ratio(method)) for method in methods)]
        for value, cell in cells.items()
    ]
    return make_table(columns, rows)


def losses_table(first: str, cells: Mapping[str, Cell], methods: Sequence[str]) -> str:
    rows = [[value, *(show_best(cell, method) for method in ("none", *methods))] for value, cell in cells.items()]
    return make_table([first, "none", *(METHODS[method] for method in methods)], rows)


def cures_table(cells: Mapping[str, Cell], recipe: str) -> str:
    """What another cure does alone, against the same cell without it, and what CS adds to it."""
    rows = []
    for name, cell in cells.items():
        cure, _, std = name.removeprefix(f"{recipe}-").partition("-std")
        plain = cells.get(f"{recipe}-std{std or OWN_STD}")
        if not name.startswith(f"{recipe}-") or re.match(r"std|depth", cure) or plain is None:
            continue
        both = "none" in cell.tables and "none" in plain.tables
        alone = edge_ratio(cell.tables["none"], plain.tables["none"]) if both else None
        rows.append(
            [cure, std or OWN_STD, show_edge(cell.edge("none")), show_ratio(alone), show_ratio(cell.ratio("cs"))]
        )
    columns = ["cure", "initial std", "edge of the cure alone", "cure / nothing", "cure with CS / cure"]
    return make_table(columns, rows)


def summary(cells: Mapping[str, Cell]) -> str:
    """How often each method raised the edge, lowered it, or was not shown to do either."""
    lines = []
    for method, label in METHODS.items():
        verdicts = Counter(ratio.verdict for cell in cells.values() if (ratio := cell.ratio(method)) is not None)
        if total := sum(verdicts.values()):
            counts = ", ".join(f"{verdict} in {count}" for verdict, count in sorted(verdicts.items()))
            lines.append(f"- {label}: of {total} cells {counts}.")
    minutes = sum(unit["worker_minutes"] for cell in cells.values() for unit in cell.units.values())
    runs = sum(len(row) for cell in cells.values() for unit in cell.units.values() for row in unit["survived"])
    return "\n".join([*lines, f"- Cost: {runs:,} runs, {minutes / 60:.1f} hours by the clock on a busy machine."])


def drawn_recipes(cells: Mapping[str, Cell], axis: str) -> dict[str, str]:
    """Those with two cells or more along an axis, by their titles: fewer make no curve."""
    return {recipe: title for recipe, title in RECIPES.items() if len(along(cells, recipe, axis)) > 1}


def figure_link(cells: Mapping[str, Cell], axis: str) -> str:
    if not drawn_recipes(cells, axis):
        return "No figure yet: it takes two cells."
    what, _, file = AXES[axis]
    return f"![The edge of each method, and its ratio to none, over the {what}](figures/{file})"


def blocks(cells: Mapping[str, Cell]) -> dict[str, str]:
    found = {"summary": summary(cells), **{f"figure {axis}": figure_link(cells, axis) for axis in AXES}}
    for recipe in RECIPES:
        scales, depths = along(cells, recipe, "std"), along(cells, recipe, "depth")
        found[f"{recipe} scale"] = ratios_table("initial std", scales, list(METHODS))
        found[f"{recipe} losses"] = losses_table("initial std", scales, list(METHODS))
        found[f"{recipe} depth"] = ratios_table("depth", depths, ["cs", "ls"])
        found[f"{recipe} cures"] = cures_table(cells, recipe)
    return found


def filled(text: str, cells: Mapping[str, Cell]) -> str:
    """The page with its blocks written anew."""
    for name, block in blocks(cells).items():
        text = re.sub(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end -->)", rf"\g<1>{block}\g<2>", text, flags=re.DOTALL)
    return text


def draw(cells: Mapping[str, Cell], axis: str) -> None:
    """Above the edges of all methods, below their ratios to the unscaled network, with 95 % intervals."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    (_, label, file), recipes = AXES[axis], drawn_recipes(cells, axis)
    grid = figure.subplots(2, len(recipes), sharex="col", squeeze=False)
    for (edges, ratios), (recipe, title) in zip(grid.T, recipes.items(), strict=True):
        found = along(cells, recipe, axis)
        for place, method in enumerate(COLOURS):
            draw_points(edges, {x: cell.edge(method) for x, cell in found.items()}, place, method)
            if method != "none":
                draw_points(ratios, {x: cell.ratio(method) for x, cell in found.items()}, place, method)
        ratios.axhline(1, color=COLOURS["none"], linewidth=1, linestyle=":")
        edges.set(title=title, ylabel="edge (learning rate)", xscale="log", yscale="log")
        ratios.set(xlabel=label, ylabel="ratio of edges to none", yscale="log")
        ratios.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        ratios.set_xticks([float(x) for x in found], list(found), rotation=45)
        ratios.minorticks_off()
    handles = [Line2D([], [], color=colour, marker="o", label=LABELS[name]) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(FIGURES / file, dpi=130)


def draw_points(axes: Any, found: Mapping[str, Edge | None], place: int, method: str) -> None:
    """A method's points, a little beside those of the others, so that their intervals can be told apart."""
    points = [(float(x) * (0.98 + 0.01 * place), edge) for x, edge in found.items() if edge is not None]
    for x, edge in points:
        if edge.low is not None:
            axes.plot([x, x], [edge.low, edge.high], color=COLOURS[method], linewidth=1.2)
    known = [(x, edge.value) for x, edge in points if edge.value is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], "o-", color=COLOURS[method], markersize=4, linewidth=1.4)


def main() -> None:
    cells = read_cells()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), cells), encoding="utf-8")
    for axis in AXES:
        if drawn_recipes(cells, axis):
            draw(cells, axis)


if __name__ == "__main__":
    main()
