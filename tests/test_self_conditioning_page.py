"""docs/self-conditioning.md says what docs/results/self-conditioning.json holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.append(str(DOCS))

import make_self_conditioning  # noqa: E402 (beside the tests, not installed)


def test_the_table_is_that_of_the_file() -> None:
    text = make_self_conditioning.PAGE.read_text(encoding="utf-8")
    assert "| held-out loss |" in text
    assert make_self_conditioning.filled(text, make_self_conditioning.read_runs()) == text


def test_runs_are_matched_by_their_seed() -> None:
    runs = [
        {"arm": arm, "method": "cs", "seed": seed, "loss": loss}
        for arm, seed, loss in (
            ("plain", 0, 1.0),
            ("self", 0, 3.0),
            ("self", 1, 9.0),
            ("plain", 2, 5.0),
            ("self", 2, 6.0),
        )
    ]
    pairs = make_self_conditioning.paired(runs, "cs", lambda run: run["loss"])
    assert list(pairs) == [(3.0, 1.0), (6.0, 5.0)]


@pytest.mark.parametrize(("values", "shown"), [(((1.0, 1.0), (0.5, 0.7)), "+0.400"), (((1.0,), (0.5,)), "–")])
def test_a_difference_is_that_of_self_conditioned_from_plain(values: tuple, shown: str) -> None:
    found = make_self_conditioning.paired_difference(*values)
    assert make_self_conditioning.show(found, ".3f").startswith(shown)
