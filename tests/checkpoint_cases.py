"""A small store of known contents, and what it takes to compare and to damage it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalelong.runs.checkpoint import Checkpoint, CheckpointStore
from scalelong.utils.atomic import Files

Groups = dict[str, dict[str, Tensor]]


def groups(seed: int = 0) -> Groups:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(4, 3, generator=generator), "bias": torch.randn(3, generator=generator)},
        "rng": {"torch": torch.randint(0, 255, (16,), generator=generator, dtype=torch.uint8)},
    }


def state(seed: int = 0) -> dict[str, Any]:
    return {"seed": seed, "lr": 0.1 + 0.2, "names": ["ä", None, True], "nested": {"big": 2**70}}


def filled(folder: Path, *steps: int, files: Files | None = None, keep_last: int = 3) -> CheckpointStore:
    store = CheckpointStore(folder, keep_last, files=files)
    for step in steps:
        store.save(step, groups(step), state(step))
    return store


def assert_holds(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None and checkpoint.step == step
    assert checkpoint.state() == state(step)
    assert set(checkpoint.groups) == set(groups())
    for group, expected in groups(step).items():
        assert_same(checkpoint.tensors(group), expected)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to the bit, type and shape: NaNs and signs of zeros included."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert (
            found[name].contiguous().flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))
        )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)
