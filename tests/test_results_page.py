"""docs/results.md says what the small files of docs/results hold, and these are whole."""

from __future__ import annotations

import json
import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_results  # noqa: E402 (beside the tests, not installed)

FILES = sorted(make_results.MAP.glob("*/*.json"))


def unit(method: str, survived: list[list[int]]) -> dict[str, Any]:
    losses = [[0.1 if flag else 1.0 for flag in row] for row in survived]
    rates = [0.004, 0.008, 0.016][: len(survived)]
    return {
        **{"cell": "cifar10-deep-std0.0653", "method": method, "seeds": [1, 2, 3, 4], "worker_minutes": 30},
        **{"rates": rates, "survived": survived, "losses": losses},
    }


def write(folder: Path, *units: dict[str, Any]) -> dict[str, make_results.Cell]:
    for one in units:
        file = folder / one["cell"] / f"{one['method']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(one), encoding="utf-8")
    return make_results.read_cells(folder)


def test_every_number_of_the_page_is_that_of_the_files() -> None:
    text = make_results.PAGE.read_text(encoding="utf-8")
    assert make_results.filled(text, make_results.read_cells()) == text


def test_the_page_has_a_place_for_every_block_and_no_other() -> None:
    text = make_results.PAGE.read_text(encoding="utf-8")
    found = re.findall(r"<!-- (?!end)(.*?) -->", text)
    known = set(make_results.blocks(make_results.read_cells())) - {"digits-deep cures"}  # No such units are planned.
    assert set(found) == known and len(found) == len(known) == text.count("<!-- end -->")


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_file_holds_one_run_for_each_seed_and_rate(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    assert file.parent.name == found["cell"] and len(set(found["seeds"])) == len(found["seeds"])
    assert all(low < high for low, high in pairwise(found["rates"]))
    for rows in (found["survived"], found["losses"]):
        assert [len(row) for row in rows] == [len(found["seeds"])] * len(found["rates"])
    survivors = [
        loss
        for flags, losses in zip(found["survived"], found["losses"], strict=True)
        for flag, loss in zip(flags, losses, strict=True)
        if flag
    ]
    assert all(math.isfinite(loss) and loss < 1 for loss in survivors)


def test_a_ratio_is_bold_only_if_its_interval_leaves_out_1(tmp_path: Path) -> None:
    none = unit("none", [[1, 1, 1, 1], [0, 0, 0, 0]])
    cells = write(tmp_path, none, unit("cs", [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]))
    ratio = cells["cifar10-deep-std0.0653"].ratio("cs")
    assert ratio is not None and ratio.value == pytest.approx(2)
    assert make_results.show_ratio(ratio).startswith("**") == (ratio.verdict == "larger")
    same = write(tmp_path / "same", none, {**none, "method": "cs"})["cifar10-deep-std0.0653"].ratio("cs")
    assert same is not None and not make_results.show_ratio(same).startswith("**")


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    cells = write(tmp_path, unit("none", [[1, 1, 1, 1], [0, 0, 0, 0]]))
    table = make_results.blocks(cells)["cifar10-deep scale"].splitlines()
    assert table[2].count(make_results.NOT_RUN) == len(make_results.METHODS)
    assert make_results.blocks(cells)["cifar10-deep cures"] == "Not run."
