"""The disk that loses what was not synced: that it loses it, and that a store of checkpoints on it loses nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_cases import assert_holds, groups, state

from faults.disk import WAYS, Disk, Recorder, Tree, crashes, write_tree
from scalelong.runs.checkpoint import CheckpointStore
from scalelong.runs.run_dir import MetricsLog
from scalelong.utils.atomic import Files, replace_text


def recorded(folder: Path, work: Callable[[Recorder], None]) -> Recorder:
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder)
    with recorder.recording():
        work(recorder)
    return recorder


def states(recorder: Recorder) -> list[tuple[int, list[object], Tree]]:
    """Every disk that may be left, at every moment: the number of the event, what was reported by then, the files."""
    chance, found = random.Random(0), []
    for number, disk in crashes(recorder, range(recorder.first, len(recorder.events))):
        trees: list[Tree] = []
        for way in WAYS:
            tree = disk.after_power_loss(way, chance)
            if tree not in trees:
                trees.append(tree)
                found.append((number, list(disk.reported), tree))
    return found


def end_of(recorder: Recorder) -> Disk:
    return next(disk for _, disk in crashes(recorder, [len(recorder.events) - 1]))


def test_what_was_not_synced_may_be_lost_torn_or_there(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "old").write_bytes(b"old")

    def work(recorder: Recorder) -> None:
        (recorder.folder / "old").write_bytes(b"new content")
        (recorder.folder / "file").write_bytes(b"abc")

    disk, chance = end_of(recorded(tmp_path / "disk", work)), random.Random(0)
    assert disk.after_power_loss("nothing", chance) == {"old": b"old"}
    assert disk.after_power_loss("names", chance) == {"old": b"old", "file": b""}
    assert disk.after_power_loss("everything", chance) == {"old": b"new content", "file": b"abc"}
    found = {tree.get("file") for tree in (disk.after_power_loss("any", chance) for _ in range(200))}
    assert found == {None, b"", b"a", b"ab", b"abc", b"a\0\0", b"ab\0", b"\0\0\0"}


def test_a_synced_file_has_a_name_only_once_its_folder_is_synced_too(tmp_path: Path) -> None:
    def work(recorder: Recorder) -> None:
        (recorder.folder / "file").write_bytes(b"abc")
        Files().sync(recorder.folder / "file")

    recorder = recorded(tmp_path / "disk", work)
    assert {tuple(tree.items()) for _, _, tree in states(recorder)[-len(WAYS) :]} >= {(), (("file", b"abc"),)}
    with recorder.recording():
        Files().sync(recorder.folder)
    assert end_of(recorder).after_power_loss("nothing", random.Random(0)) == {"file": b"abc"}


def test_a_file_is_the_old_one_or_the_new_one_and_after_the_call_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "file").write_text("old")

    def work(recorder: Recorder) -> None:
        replace_text(recorder.folder / "file", "new and longer")
        recorder.report("saved")

    for _, reported, tree in states(recorded(tmp_path / "disk", work)):
        assert tree["file"] in ([b"new and longer"] if reported else [b"old", b"new and longer"])


def save_some(recorder: Recorder) -> None:
    """Checkpoints in a folder that is not there yet; one of them is saved again, and old ones are removed."""
    store = CheckpointStore(recorder.folder / "run" / "checkpoints", keep_last=2)
    for step in (1, 2, 3, 3, 4):
        store.save(step, groups(step), state(step))
        recorder.report(step)


def lost(recorder: Recorder, place: Path) -> int:
    """In how many states an older checkpoint than the last one that was reported is the newest, or none is."""
    count = 0
    for number, (_, reported, tree) in enumerate(states(recorder)):
        store = CheckpointStore(write_tree(tree, place / str(number)) / "run" / "checkpoints")
        latest = store.latest()
        count += (0 if latest is None else latest.step) < max(map(int, map(str, reported)), default=0)
        if latest is not None:
            assert_holds(latest, latest.step)
    return count


def test_no_checkpoint_that_was_saved_is_lost_whenever_the_power_goes(tmp_path: Path) -> None:
    recorder = recorded(tmp_path / "disk", save_some)
    assert len(recorder.events) > 100, "the record would prove little"
    assert lost(recorder, tmp_path) == 0


@pytest.mark.parametrize("forgotten", ["files", "folders", "new folders"])
def test_a_sync_that_is_forgotten_is_seen(tmp_path: Path, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = Files.sync

    def forgetful(self: Files, path: Path) -> None:
        if path.is_dir() != (forgotten == "folders"):
            sync(self, path)

    if forgotten == "new folders":
        monkeypatch.setattr(Files, "make_folder", lambda self, path: os.makedirs(path, exist_ok=True))
    else:
        monkeypatch.setattr(Files, "sync", forgetful)
    recorder = recorded(tmp_path / "disk", save_some)
    try:
        assert lost(recorder, tmp_path)
    except RuntimeError as error:  # All checkpoints that are left are damaged.
        assert "no checkpoint" in str(error)


def test_a_log_that_a_checkpoint_counts_on_is_there(tmp_path: Path) -> None:
    def work(recorder: Recorder) -> None:
        Files().make_folder(recorder.folder / "run")
        log = MetricsLog(recorder.folder / "run" / "metrics.jsonl")
        for step in range(3):
            log.write({"step": step})
            recorder.report(log.facts()["metrics_size"])

    for _, reported, tree in states(recorded(tmp_path / "disk", work)):
        written = tree.get("run/metrics.jsonl") or b""
        assert len(written) >= (int(str(reported[-1])) if reported else 0)
