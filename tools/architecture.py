"""Draws the packages of scalelong from their imports, and writes docs/architecture.md.

python tools/architecture.py            # the figure and the table of packages; the walks are those of the page
python tools/architecture.py --walks    # also follows every command again, which takes a minute
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from walk import COMMANDS, SOURCE, follow_all

ROOT = SOURCE.parent.parent
PAGE = ROOT / "docs" / "architecture.md"
FIGURE = ROOT / "docs" / "figures" / "architecture.svg"

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 96, 34, 34, 18, 16

Graph = Mapping[str, set[str]]


def packages() -> list[str]:
    return sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def import_graph() -> dict[str, set[str]]:
    """Which packages each one imports, wherever in a file."""
    return {name: imports_of(SOURCE / name) - {name} for name in packages()}


def imports_of(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        depth = len(file.relative_to(SOURCE).parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == depth:
                found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found & set(packages())


def columns(graph: Graph) -> dict[str, int]:
    """As far to the right as a package can stand: just before the first that imports it."""

    def steps_to_the_end(name: str) -> int:
        return 1 + max((steps_to_the_end(other) for other in graph if name in graph[other]), default=-1)

    steps = {name: steps_to_the_end(name) for name in graph}
    return {name: max(steps.values()) - steps[name] for name in graph}


def reduced(graph: Graph) -> list[tuple[str, str]]:
    """The imports that no longer way says already: an arrow from what is imported to who imports it."""
    reach: dict[str, set[str]] = {}

    def below(name: str) -> set[str]:
        if name not in reach:
            reach[name] = graph[name].union(*(below(other) for other in graph[name]))
        return reach[name]

    return [
        (other, name)
        for name in sorted(graph)
        for other in sorted(graph[name])
        if not any(other in below(between) for between in graph[name] - {other})
    ]


def draw(graph: Graph) -> str:
    """The packages as SVG, data enters at the left and leaves at the right."""
    column, arrow_list = columns(graph), reduced(graph)
    rows: dict[int, list[str]] = {}
    for name in sorted(graph):
        rows.setdefault(column[name], []).append(name)
    tallest, widest = max(map(len, rows.values())), max(rows)
    height = 2 * MARGIN + tallest * HEIGHT + (tallest - 1) * GAP_Y
    width = 2 * MARGIN + (widest + 1) * WIDTH + widest * GAP_X
    place: dict[str, tuple[float, float]] = {}

    def level(name: str) -> float:
        """The mean height of the packages that it has an arrow to."""
        targets = [place[after][1] for before, after in arrow_list if before == name]
        return sum(targets) / max(len(targets), 1)

    for number in sorted(rows, reverse=True):
        names = sorted(rows[number], key=level)
        top = (height - len(names) * HEIGHT - (len(names) - 1) * GAP_Y) / 2
        for row, name in enumerate(names):
            place[name] = MARGIN + number * (WIDTH + GAP_X), top + row * (HEIGHT + GAP_Y)
    arrows = "\n".join(arrow(place[before], place[after]) for before, after in arrow_list)
    boxes = "\n".join(box(name, *place[name]) for name in sorted(graph))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
        'font-size="13">\n<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#7a869a"/></marker></defs>\n'
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n{arrows}\n{boxes}\n</svg>\n'
    )


def arrow(before: tuple[float, float], after: tuple[float, float]) -> str:
    x, y = before[0] + WIDTH, before[1] + HEIGHT / 2
    to_x, to_y = after[0], after[1] + HEIGHT / 2
    bend = (to_x - x) / 2
    return (
        f'<path d="M{x:g} {y:g} C{x + bend:g} {y:g} {to_x - bend:g} {to_y:g} {to_x - 2:g} {to_y:g}" fill="none" '
        'stroke="#7a869a" marker-end="url(#tip)"/>'
    )


def box(name: str, x: float, y: float) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3fb" stroke="#3b6fb6"/>'
        f'<text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 4.5:g}" text-anchor="middle" fill="#1d2b3a">'
        f"{escape(name)}</text>"
    )


def table_of_packages(graph: Graph) -> str:
    """What each package holds, in the order of the figure."""
    order = sorted(graph, key=lambda name: (columns(graph)[name], name))
    lines = ["| package | what it holds | files |", "| --- | --- | --- |"]
    for name in order:
        files = sorted(path.stem for path in (SOURCE / name).rglob("*.py") if path.stem != "__init__")
        said = (ast.get_docstring(ast.parse((SOURCE / name / "__init__.py").read_text(encoding="utf-8"))) or "").strip()
        lines.append(f"| `{name}` | {said.splitlines()[0].rstrip('.')} | {', '.join(files)} |")
    return "\n".join(lines)


def table_of_walks() -> str:
    """How many files a reader opens to follow each command, and those of `train`."""
    lines = ["| command | files opened | packages | changes of package |", "| --- | --- | --- | --- |"]
    walks = follow_all()
    for name, walk in walks.items():
        command, comma, rest = name.partition(",")
        lines.append(f"| `scalelong {command}`{comma}{rest} | {len(walk.files)} | {walk.packages} | {walk.changes} |")
    return "\n".join([*lines, "", "A plain `scalelong train` on its way:", "", walks["train"].as_text()])


def replaced(page: str, section: str, content: str) -> str:
    """The page with another content between `<!-- section -->` and `<!-- end of section -->`."""
    pattern = rf"(<!-- {section} -->\n).*?(<!-- end of {section} -->)"
    assert re.search(pattern, page, re.S), f"{PAGE} has no section {section}"
    return re.sub(pattern, lambda match: f"{match[1]}\n{content}\n\n{match[2]}", page, flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", action="store_true", help=f"follow {', '.join(COMMANDS)} again")
    options = parser.parse_args()
    graph = import_graph()
    FIGURE.write_text(draw(graph), encoding="utf-8")
    page = replaced(PAGE.read_text(encoding="utf-8"), "packages", table_of_packages(graph))
    if options.walks:
        page = replaced(page, "walks", table_of_walks())
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and {FIGURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
