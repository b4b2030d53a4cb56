"""Blocks of features: dealt out by number, made once, and waited for by the first process alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from scalelong.evaluation.blocks import Blocks
from scalelong.utils.distributed import Rank


def count_up(numbers: range, told: Callable[[float], None]) -> Tensor:
    """Features that are the numbers of their images."""
    told(0.5)
    return torch.tensor(numbers).float()[:, None]


def test_the_first_process_waits_for_the_blocks_of_the_others(tmp_path: Path) -> None:
    own_is_made, found = threading.Event(), []

    blocks = Blocks(tmp_path / "blocks", {"network": "numbers"}, 300, count_up, lambda *_: own_is_made.set())
    first = threading.Thread(target=lambda: found.append(blocks.compute(Rank(0, 2))), daemon=True)
    first.start()
    assert own_is_made.wait(timeout=60)
    first.join(timeout=0.5)
    assert first.is_alive() and not found
    blocks.compute(Rank(1, 2))
    first.join(timeout=60)
    assert torch.equal(found[0], torch.arange(300.0)[:, None])


def test_blocks_are_dealt_out_by_number(tmp_path: Path) -> None:
    made: list[int] = []

    def make(numbers: range, told: Callable[[float], None]) -> Tensor:
        made.append(numbers.start)
        return count_up(numbers, told)

    blocks = Blocks(tmp_path / "blocks", {"network": "numbers"}, 1000, make)
    assert blocks.compute(Rank(1, 2)) is None
    assert made == [256, 768]
    all_of_them = blocks.compute(Rank(0, 2))
    assert made == [256, 768, 0, 512]
    assert all_of_them is not None and torch.equal(all_of_them, torch.arange(1000.0)[:, None])
    assert blocks.compute(Rank(1, 2)) is None
    assert made == [256, 768, 0, 512], "a process that comes late makes nothing again"


def test_a_process_that_was_slow_does_not_make_again_what_others_have_finished(tmp_path: Path) -> None:
    made: list[int] = []

    def make(numbers: range, told: Callable[[float], None]) -> Tensor:
        made.append(numbers.start)
        if made == [256]:
            # Meanwhile a command with one process comes, does everything and finishes the folder.
            Blocks(tmp_path / "blocks", {}, 1000, count_up).compute()
        return count_up(numbers, told)

    Blocks(tmp_path / "blocks", {}, 1000, make).compute(Rank(1, 2))
    assert made == [256]


def test_progress_moves_within_a_block(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []
    Blocks(tmp_path / "blocks", {}, 300, count_up, lambda *done: seen.append(done)).compute()
    assert seen == [(0, 300), (128, 300), (256, 300), (278, 300), (300, 300)]
