"""A short campaign finds nothing wrong, would say so if it did, and the page about it shows what the long one found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faults.campaign import PLAN, Row, table
from faults.children import End
from faults.damage import judge

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "faults.json"


def test_a_short_campaign_finds_nothing_wrong() -> None:
    command = [sys.executable, "-m", "faults", "--size", "short", "--seed", "0"]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 0\n") and "| **all** |" in done.stdout


@pytest.mark.parametrize(
    ("end", "different", "kind"),
    [
        (End(2, "", "error: config.yaml was changed\n"), {}, "refused"),
        (End(0, "finished", ""), {}, "recovered"),
        (End(0, "finished", ""), {"checkpoints": "other weights"}, "wrong"),
        (End(0, "metrics.jsonl: 2 lines are lost", ""), {"metrics.jsonl": "other lines"}, "recovered"),
        (End(1, "", "Traceback (most recent call last):\n"), {}, "wrong"),
        (End(1, "", "error: this is a defect of scalelong\n"), {}, "wrong"),
        (End(2, "", "Traceback (most recent call last):\nerror: x\n"), {}, "wrong"),
        (End(-9, "", ""), {}, "wrong"),
    ],
)
def test_silence_about_a_difference_is_wrong_and_so_is_a_traceback(
    end: End, different: dict[str, str], kind: str
) -> None:
    assert judge(end, [Path("file")], lambda: different).kind == kind


def test_the_page_shows_the_table_of_the_long_campaign() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = {planned.name: Row(**found["rows"][planned.name]) for planned in PLAN}
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert "\n".join(table(rows)) in page


def test_the_long_campaign_was_long_and_found_nothing_wrong() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    counts = {
        kind: sum(row["tries"] for name, row in rows.items() if name.startswith(kind)) for kind in ("kill", "dam")
    }
    assert counts["kill"] >= 300 and counts["dam"] >= 2000
    assert rows["recipe"]["tries"] + rows["override"]["tries"] >= 3000
    assert sum(row["wrong"] for row in rows.values()) == 0
