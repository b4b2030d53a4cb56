"""Numbered blocks: made once, verified, never mixed with those of other settings, and kept through kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scalelong.utils.atomic import Damaged
from scalelong.utils.block_folder import INDEX, BlockError, BlockFolder, block_ranges


class Killed(Exception):
    pass


def fill(folder: Path, count: int = 10, *, kills_at: int | None = None, seed: int = 0) -> list[int]:
    """Fill a folder with the numbers of its rows; returns the first rows of the blocks that were made."""
    store, made = BlockFolder(folder), []

    def make(name: str, rows: range, done: Callable[[float], None]) -> None:
        if rows.start == kills_at:
            raise Killed
        made.append(rows.start)
        store.add(name, {"rows": torch.tensor(rows)}, rows=len(rows), broken={})

    assert store.fill({"seed": seed}, block_ranges(count, 4), make)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_folder_is_incomplete_and_ends_as_one_that_was_not(tmp_path: Path) -> None:
    assert fill(tmp_path / "whole") == [0, 4, 8]
    with pytest.raises(Killed):
        fill(tmp_path / "killed", kills_at=8)
    index = BlockFolder(tmp_path / "killed").index()
    assert index is not None and index.entries is None
    (tmp_path / "killed" / ".tmp-1-block-00002.safetensors").write_bytes(b"half")
    assert fill(tmp_path / "killed") == [8]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert fill(tmp_path / "killed") == []


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"other")])
def test_a_missing_or_damaged_block_is_made_again_alone(damage: Callable[[Path], object], tmp_path: Path) -> None:
    fill(tmp_path / "blocks")
    whole = contents(tmp_path / "blocks")
    store = BlockFolder(tmp_path / "blocks")
    index = store.index()
    assert index is not None and index.entries is not None
    damage(store.shard("block-00001"))
    with pytest.raises(Damaged, match="block-00001.safetensors"):
        store.verify(index.entries["block-00001"])
    assert fill(tmp_path / "blocks") == [4]
    assert contents(tmp_path / "blocks") == whole


def test_more_rows_keep_the_full_blocks_of_fewer(tmp_path: Path) -> None:
    assert fill(tmp_path / "blocks", 6) == [0, 4]
    assert fill(tmp_path / "blocks", 10) == [4, 8]
    assert fill(tmp_path / "blocks", 6) == [], "the smaller job is still there"


def test_a_folder_of_other_settings_another_version_or_other_files_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "blocks")
    with pytest.raises(BlockError, match=r"made with other settings \(seed 0 → 1\): give the same ones, or remove it"):
        fill(tmp_path / "blocks", seed=1)
    assert BlockFolder(tmp_path / "blocks").begin({"seed": 1}, ignore=["seed"]).fingerprint == {"seed": 0}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years of work")
    with pytest.raises(BlockError, match="holds other files"):
        fill(tmp_path / "work")
    assert contents(tmp_path / "work") == {"thesis.tex": b"years of work"}


def test_a_damaged_index_is_as_good_as_none(tmp_path: Path) -> None:
    fill(tmp_path / "blocks")
    index = tmp_path / "blocks" / INDEX
    index.write_bytes(index.read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    assert BlockFolder(tmp_path / "blocks").index() is None
    assert fill(tmp_path / "blocks") == [0, 4, 8]
