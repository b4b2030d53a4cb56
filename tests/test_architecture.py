"""docs/architecture.md says what the code is: its packages, its arrows, and how far one walks for a command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import architecture  # noqa: E402 (beside the tests, not installed)
import walk  # noqa: E402

PAGE = architecture.PAGE.read_text(encoding="utf-8")

# A file is one idea; two that are always read together are one.
LONGEST, SHORTEST = 350, 40
# Short with a reason: what they hold has nothing in common with any other file.
SHORT: set[str] = set()
# How far a reader walks through a plain run.
MOST_OPENED, MOST_CHANGES = 25, 10


def test_the_figure_is_drawn_from_the_imports() -> None:
    assert architecture.FIGURE.read_text(encoding="utf-8") == architecture.draw(architecture.import_graph())


def test_the_table_of_packages_is_that_of_the_code() -> None:
    assert architecture.table_of_packages(architecture.import_graph()) in PAGE


def test_the_walk_through_train_is_that_of_the_page() -> None:
    found = walk.follow_all("train")["train"]
    assert found.as_text() in PAGE
    assert len(found.files) <= MOST_OPENED and found.changes <= MOST_CHANGES


def lengths() -> dict[str, int]:
    files = {path.relative_to(walk.SOURCE).as_posix(): path for path in walk.SOURCE.rglob("*.py")}
    return {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}


def test_files_are_neither_long_nor_short_without_a_reason() -> None:
    found = {name: lines for name, lines in lengths().items() if not name.endswith("__.py")}
    assert {name for name, lines in found.items() if lines > LONGEST} == set()
    assert {name for name, lines in found.items() if lines < SHORTEST} == SHORT


def test_import_graphs_are_read_wherever_the_import_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"low": "", "high": "def f():\n    from ..low import thing\n    from . import own\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f'"""The package {name}."""\n')
        (tmp_path / name / "file.py").write_text(text)
    monkeypatch.setattr(architecture, "SOURCE", tmp_path)
    assert architecture.import_graph() == {"low": set(), "high": {"low"}}
    assert architecture.reduced({"a": set(), "b": {"a"}, "c": {"a", "b"}}) == [("a", "b"), ("b", "c")]
