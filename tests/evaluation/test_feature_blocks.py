"""Blocks of features: dealt out by number, made once, and waited for by the first process alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalelong.evaluation.features import Describe, fill_features, stored_features
from scalelong.utils.block_folder import Progress
from scalelong.utils.runtime import SINGLE, Rank


def count_up(numbers: range, progress: Callable[[float], None]) -> Tensor:
    """Features that are the numbers of their images."""
    progress(0.5)
    return torch.tensor(numbers).float()[:, None]


def compute(
    folder: Path, count: int, rank: Rank = SINGLE, describe: Describe = count_up, progress: Progress = lambda *_: None
) -> Tensor | None:
    if not fill_features(folder, {"network": "numbers"}, count, describe, rank, progress):
        return None
    return torch.cat(list(stored_features(folder, count)))


def test_the_first_process_waits_for_the_blocks_of_the_others(tmp_path: Path) -> None:
    own_is_made, found = threading.Event(), []

    def first_process() -> None:
        found.append(compute(tmp_path / "blocks", 300, Rank(0, 2), progress=lambda *_: own_is_made.set()))

    first = threading.Thread(target=first_process, daemon=True)
    first.start()
    assert own_is_made.wait(timeout=60)
    first.join(timeout=0.5)
    assert first.is_alive() and not found
    compute(tmp_path / "blocks", 300, Rank(1, 2))
    first.join(timeout=60)
    assert torch.equal(found[0], torch.arange(300.0)[:, None])


def test_blocks_are_dealt_out_by_number(tmp_path: Path) -> None:
    made: list[int] = []

    def make(numbers: range, progress: Callable[[float], None]) -> Tensor:
        made.append(numbers.start)
        return count_up(numbers, progress)

    folder = tmp_path / "blocks"
    assert compute(folder, 1000, Rank(1, 2), make) is None
    assert made == [256, 768]
    all_of_them = compute(folder, 1000, Rank(0, 2), make)
    assert made == [256, 768, 0, 512]
    assert all_of_them is not None and torch.equal(all_of_them, torch.arange(1000.0)[:, None])
    assert compute(folder, 1000, Rank(1, 2), make) is None
    assert made == [256, 768, 0, 512], "a process that comes late makes nothing again"


def test_a_process_that_was_slow_does_not_make_again_what_others_have_finished(tmp_path: Path) -> None:
    made: list[int] = []

    def make(numbers: range, progress: Callable[[float], None]) -> Tensor:
        made.append(numbers.start)
        if made == [256]:
            # Meanwhile a command with one process comes, does everything and finishes the folder.
            compute(tmp_path / "blocks", 1000)
        return count_up(numbers, progress)

    compute(tmp_path / "blocks", 1000, Rank(1, 2), make)
    assert made == [256]


def test_progress_moves_within_a_block(tmp_path: Path) -> None:
    seen: list[Any] = []
    compute(tmp_path / "blocks", 300, progress=lambda *done: seen.append(done))
    assert seen == [(0, 300), (128, 300), (256, 300), (278, 300), (300, 300)]
