"""Damage is seen, named, and never loaded."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import assert_holds, filled, flip_bit, groups, state, truncate

from scalelong.runs.checkpoint import MANIFEST, CheckpointError, CheckpointStore, manifest_of

FILES = ["model.safetensors", "rng.safetensors", "state.json", "manifest.json"]
DAMAGE = {"truncated": truncate, "emptied": lambda path: os.truncate(path, 0), "missing": Path.unlink}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_is_skipped_by_name_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    store = filled(tmp_path, 1, 2)
    DAMAGE[damage](tmp_path / "step-000002" / name)
    with caplog.at_level(logging.WARNING):
        assert_holds(store.latest(), 1)
    (record,) = caplog.records
    assert f"checkpoint {tmp_path / 'step-000002'} is damaged and was skipped: {name}" in record.getMessage()


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_seen(tmp_path: Path, name: str) -> None:
    store = filled(tmp_path, 1)
    path = tmp_path / "step-000001" / name
    size = path.stat().st_size
    # The manifest is the one without a checksum elsewhere.
    step = 3 if name == MANIFEST else size // 8
    for position in (*range(0, size, step), size - 1):
        bit = position % 8
        flip_bit(path, position, bit)
        with pytest.raises(CheckpointError, match=f"step-000001 is damaged: {name}"):
            store.load(1)
        flip_bit(path, position, bit)
    assert_holds(store.load(1), 1)


def test_damage_to_all_is_an_error_rather_than_a_silent_new_start(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    for step in (1, 2):
        truncate(tmp_path / f"step-{step:06d}" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete \(step-000002: .*; step-000001: .*\)"):
        store.latest()


def test_a_damaged_best_gives_way_to_the_next(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step, metric in ((1, 0.3), (2, 0.1), (3, 0.2)):
        store.save(step, groups(step), state(step), metric)
    truncate(tmp_path / "step-000002" / "model.safetensors")
    assert_holds(store.best(), 3)


def test_a_copy_under_another_steps_name_is_not_taken_for_it(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000009")
    assert_holds(store.latest(), 1)


def test_a_missing_step_or_group_is_an_error_that_lists_those_there_are(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step-000007\. Steps in .*: 1, 2\."):
        store.load(7)
    with pytest.raises(CheckpointError, match="has no group 'ema'; it has model, rng"):
        store.load(2).tensors("ema")


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('a pickle was loaded')",))


def test_planted_pickles_are_never_opened(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    for name in ("model.pt", "optimizer.bin", "state.pkl"):
        for folder in (tmp_path, tmp_path / "step-000001"):
            (folder / name).write_bytes(pickle.dumps(Bomb()))
    with recorded_events("open", "pickle.find_class") as events:
        assert_holds(store.latest(), 1)
        store.save(2, groups(2), state(2))
    assert any(event.endswith("state.json") for event in events), "the record would prove nothing"
    assert not [event for event in events if event.endswith((".pt", ".bin", ".pkl", "exec"))]


@contextmanager
def recorded_events(*kinds: str) -> Iterator[list[str]]:
    """The arguments of the interpreter's own audit events; its hooks cannot be removed, only silenced."""
    events: list[str] = []
    active = [True]

    def hook(kind: str, args: tuple[Any, ...]) -> None:
        if active and kind in kinds:
            events.append(" ".join(map(str, args[:2])) if kind != "open" else str(args[0]))

    sys.addaudithook(hook)
    try:
        yield events
    finally:
        active.clear()


def test_a_pickle_under_a_listed_name_is_damage(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    (tmp_path / "step-000002" / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    assert_holds(store.latest(), 1)


@pytest.mark.parametrize(
    "name",
    ["../../x", "../outside.safetensors", "/etc/passwd", "a/b.safetensors", "model.pt", "", "..", "manifest.json"],
)
def test_a_manifest_that_points_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    store = filled(tmp_path / "store", 1, 2)
    (tmp_path / "store" / "outside.safetensors").write_bytes(b"")
    folder = tmp_path / "store" / "step-000002"
    (folder / MANIFEST).write_bytes(manifest_of(2, None, {"state.json": (1, "0"), name: (0, "0")}))
    with pytest.raises(CheckpointError, match="which no save writes"):
        store.load(2)
    assert_holds(store.latest(), 1)


@pytest.mark.parametrize(
    "text",
    ["null", "[]", "{}", "[" * 100_000, '{"step": "2", "metric": null, "files": {}}', "\xff", '{"format": 99}']
    + ['{"format": 1, "step": 2, "metric": null, "files": {"state.json": 3}}', "9" * 5000],
    ids=range(9),
)
def test_a_manifest_of_any_other_content_is_damage(tmp_path: Path, text: str) -> None:
    store = filled(tmp_path, 1, 2)
    (tmp_path / "step-000002" / MANIFEST).write_text(text, encoding="latin-1")
    assert_holds(store.latest(), 1)


def test_a_symlink_in_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    real = tmp_path / "step-000002" / "model.safetensors"
    real.rename(tmp_path / "elsewhere")
    real.symlink_to(tmp_path / "elsewhere")
    assert_holds(store.latest(), 1)


def test_a_manifest_with_unlisted_state_is_damage(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    (tmp_path / "step-000002" / MANIFEST).write_bytes(manifest_of(2, None, {}))
    assert_holds(store.latest(), 1)
