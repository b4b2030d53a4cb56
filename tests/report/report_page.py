"""The page of `scalelong report` as tests read it, and folders whose every text tries to become markup."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_cases import HOSTILE, edited, write_comparison, write_json, write_run

from scalelong.report import read_content, render

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.raw: dict[str, str] = {}
        self.inside = ""
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in ("script", "style"):
            self.raw[self.inside] = data
            if data.startswith("{"):
                self.raw["data"] = data
        else:
            self.words.append(data)

    def having(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get(name)) is not None]

    @property
    def data(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.raw["data"], parse_constant=refuse)


def page_of(*folders: Path, live: bool = False) -> Page:
    return Page(render(read_content(folders), live=live))


def hostile_comparison(folder: Path) -> Path:
    """Every text of a comparison, and the names of its folders, try to become markup."""
    made = write_comparison(folder / "comparison", recipe=HOSTILE, seeds=1)
    with edited(made / "results.json") as results:
        results.update(dict.fromkeys(("description", "command", "baseline"), HOSTILE), warnings=[HOSTILE])
        for arm in results["arms"]:
            arm |= {"id": f"{arm['id']} {HOSTILE}", "label": f"{arm['label']} {HOSTILE}", "setting": HOSTILE}
            arm["runs"][0] |= {"message": HOSTILE, "status": HOSTILE}
        for one in results["comparisons"]:
            one |= {"arm": f"{one['arm']} {HOSTILE}", "sentence": HOSTILE, "verdict": HOSTILE, "setting": HOSTILE}
    write_json(made / "kappa.json", {"kappa": 0.7, "where": HOSTILE, "reasons": [HOSTILE]})
    return made


def hostile_run(folder: Path) -> Path:
    """A slash cannot be part of a folder's name."""
    made = write_run(folder / HOSTILE.replace("/", "⁄"), name=HOSTILE, watched=True)
    with (made / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for event in ("oscillation", "diverged"):
            file.write(json.dumps({"step": 9, "event": event, "message": HOSTILE}) + "\n")
        file.write(json.dumps({"step": 9, "event": "skipped", "origin": HOSTILE}) + "\n")
    return made
