"""The page: one HTML file that needs no other and no network, written again whenever its folders change."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

from ..utils.atomic import replace_text
from . import sections
from .blocks import Chart, Intervals, IntervalScale, Part, chart_data, chart_table
from .comparison import is_comparison, read_comparison
from .comparison_page import comparison_part
from .run_page import runs_part
from .runs import is_run, read_run

TEMPLATES = Path(__file__).parent / "templates"

RELOAD_SECONDS, POLL_SECONDS = 5, 2.0

QUIET_POLLS = 10
"""How long a watch goes on when all is finished: a run draws its last samples after its last step."""

WATCHED = ("*.json", "*.jsonl", "*.yaml", "samples/*.png")


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
        if not source.exists():
            raise NotAReport(f"{source} does not exist: name the folder of a run or of a comparison")
        if not (is_run(source) or is_comparison(source)):
            raise NotAReport(
                f"{source} is neither a run nor a comparison: a run's folder holds config.yaml or metrics.jsonl, "
                "a comparison's results.json or comparison.json"
            )
    comparisons = [source for source in sources if is_comparison(source)]
    runs = [source for source in sources if not is_comparison(source)]
    album = sections.Album(sections.BUDGET)
    parts = [comparison_part(read_comparison(one), album).under(f"c{place}") for place, one in enumerate(comparisons)]
    if runs:
        part = runs_part(list(map(read_run, runs, distinct_labels(runs))), album).under("r")
        parts = [*parts, part] if is_comparison(sources[0]) else [part, *parts]
    return Content(parts)


def distinct_labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart.

    >>> distinct_labels([Path("/a/cs/seed-0"), Path("/a/ls/seed-0")])
    ['cs/seed-0', 'ls/seed-0']
    """
    paths = [folder.absolute() for folder in folders]
    labels = (["/".join(path.parts[-parts:]) for path in paths] for parts in count(1))
    return next(found for found in labels if len(set(found)) == len(set(paths)))


def write_page(content: Content, path: Path, *, live: bool = False) -> None:
    """Write the page, whole or not at all. A live one loads itself again every few seconds."""
    # Half of a pair of surrogates may stand in a file's name or in JSON, and in no page.
    text = render(content, live=live).encode(errors="replace").decode()
    replace_text(path, text)


def render(content: Content, *, live: bool = False) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("style.css", "chart.js"))
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals.update(scale_of=IntervalScale.of, table_of=chart_table)
    title = content.parts[0].title if len(content.parts) == 1 else f"{len(content.parts)} reports"
    charts = [chart_data(chart) for chart in content.charts]
    data = embedded({"charts": charts, "reload": RELOAD_SECONDS if live else 0})
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    code = {"style": style, "script": script, "policy": policy(style, script)}
    page = environment.get_template("page.html")
    return page.render(content=content, title=title, live=live, data=data, made=made, **code)


def policy(style: str, script: str) -> str:
    """Nothing is loaded from anywhere, and no code runs but our own script, known by its hash."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    allowed = "style-src 'sha256-{}'; script-src 'sha256-{}'".format(*hashes)
    return f"default-src 'none'; img-src data:; {allowed}; base-uri 'none'; form-action 'none'"


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it lies in, nor begin a comment there.

    >>> embedded({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def watch_content(sources: Sequence[Path], wait: Callable[[float], None] = time.sleep) -> Iterator[Content]:
    """The content now and after every change; ends when all is finished and nothing has changed for a while."""
    content, before, quiet = None, None, 0
    while content is None or not content.finished or quiet < QUIET_POLLS:
        # Looked at before it is read: what is written meanwhile is a change for the next round.
        now = state_of(sources)
        quiet = quiet + 1 if now == before else 0
        if now != before:
            content, before = read_content(sources), now
            yield content
        wait(POLL_SECONDS)


def state_of(sources: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Size and time of every file that a page is made of; checkpoints are none of them."""
    found = {}
    folders = [folder for source in sources for folder in (source, *source.glob("runs/*/*"))]
    for path in (path for folder in folders for pattern in WATCHED for path in folder.glob(pattern)):
        try:
            status = path.stat()
        except OSError:
            continue  # Replaced just now.
        found[path] = (status.st_size, status.st_mtime_ns)
    return found
