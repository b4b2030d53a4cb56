"""The page: one HTML file that needs no other and no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..utils.atomic import Files, atomic_write
from . import pictures
from .blocks import Chart, Intervals, Part
from .charts import IntervalScale, chart_data, chart_table
from .comparison import is_comparison, read_comparison
from .comparison_page import comparison_part
from .run_page import runs_part
from .runs import distinct_labels, is_run, read_run

TEMPLATES = Path(__file__).parent / "templates"

RELOAD_SECONDS = 5


class NotAReport(ValueError):
    """A folder that is neither a run nor a comparison."""


@dataclass(frozen=True)
class Content:
    """What was read from the folders, ready to be drawn."""

    parts: Sequence[Part]

    @property
    def finished(self) -> bool:
        return all(part.state != "running" for part in self.parts)

    @property
    def charts(self) -> list[Chart]:
        return [block for part in self.parts for block in part.blocks if isinstance(block, Chart)]

    @property
    def intervals(self) -> list[Intervals]:
        return [block for part in self.parts for block in part.blocks if isinstance(block, Intervals)]


def read_content(sources: Sequence[Path]) -> Content:
    """Read comparisons one by one and all runs as a group, in the order in which they were named."""
    for source in sources:
        check_source(source)
    comparisons = [source for source in sources if is_comparison(source)]
    runs = [source for source in sources if not is_comparison(source)]
    album = pictures.Album(pictures.BUDGET)
    parts = [comparison_part(read_comparison(one), album).under(f"c{place}") for place, one in enumerate(comparisons)]
    if runs:
        part = runs_part(list(map(read_run, runs, distinct_labels(runs))), album).under("r")
        parts = [*parts, part] if is_comparison(sources[0]) else [part, *parts]
    return Content(parts)


def check_source(source: Path) -> None:
    if not source.exists():
        raise NotAReport(f"{source} does not exist: name the folder of a run or of a comparison")
    if not (is_run(source) or is_comparison(source)):
        raise NotAReport(
            f"{source} is neither a run nor a comparison: a run's folder holds config.yaml or metrics.jsonl, "
            "a comparison's results.json or comparison.json"
        )


def write_page(content: Content, path: Path, *, live: bool = False) -> None:
    """Write the page, whole or not at all. A live one loads itself again every few seconds."""
    # Half of a pair of surrogates may stand in a file's name or in JSON, and in no page.
    data = render(content, live=live).encode(errors="replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda temporary: Files().write_bytes(temporary, data))


def render(content: Content, *, live: bool = False) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("style.css", "chart.js"))
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals.update(scale_of=IntervalScale.of, table_of=chart_table)
    charts = [chart_data(chart) for chart in content.charts]
    return environment.get_template("page.html").render(
        content=content,
        title=content.parts[0].title if len(content.parts) == 1 else f"{len(content.parts)} reports",
        policy=policy(style, script),
        style=style,
        script=script,
        data=embedded({"charts": charts, "reload": RELOAD_SECONDS if live else 0}),
        live=live,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def policy(style: str, script: str) -> str:
    """Nothing is loaded from anywhere, and no code runs but our own script, known by its hash."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    return (
        "default-src 'none'; img-src data:; style-src 'sha256-{}'; script-src 'sha256-{}'; "
        "base-uri 'none'; form-action 'none'"
    ).format(*digests)


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it lies in, nor begin a comment there.

    >>> embedded({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
