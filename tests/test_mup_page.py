"""docs/mup.md says what the small files of docs/results/mup hold."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_mup  # noqa: E402 (beside the tests, not installed)


def test_every_number_of_the_tables_is_that_of_the_files() -> None:
    text = make_mup.PAGE.read_text(encoding="utf-8")
    assert make_mup.filled(text) == text


def test_the_page_has_a_place_for_every_block_and_no_other() -> None:
    found = re.findall(r"<!-- (?!end)(.*?) -->", make_mup.PAGE.read_text(encoding="utf-8"))
    assert sorted(found) == sorted(make_mup.blocks())


def test_the_standard_parametrization_fails_the_coordinate_check_of_the_page_and_mup_passes() -> None:
    assert [make_mup.read(f"coordcheck-{name}")["passed"] for name in ("standard", "mup")] == [False, True]


def test_no_file_names_a_place_of_the_machine() -> None:
    for file in make_mup.KEPT.glob("*.json"):
        assert not re.search(r'"[^"]*[ =]/\w', file.read_text(encoding="utf-8")), file
