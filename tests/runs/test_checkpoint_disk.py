"""The disk may refuse and the process may be killed at any moment of a save."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import assert_holds, contents, filled, groups, state

from scalelong.runs.checkpoint import CheckpointError, CheckpointStore
from scalelong.utils.atomic import Files, human_size


class FailingFiles(Files):
    """Counts what a save asks of the disk, and refuses call number `fail_at`, or every one from there on."""

    def __init__(self, fail_at: int | None = None, *, forever: bool = False, number: int = errno.ENOSPC) -> None:
        self.fail_at = fail_at
        self.forever = forever
        self.number = number
        self.calls: list[str] = []

    def _call(self, name: str, path: Path) -> None:
        self.calls.append(name)
        index = len(self.calls) - 1
        if self.fail_at is not None and (index == self.fail_at or (self.forever and index > self.fail_at)):
            if name.startswith("write"):
                path.write_bytes(b"half of it")
            raise OSError(self.number, os.strerror(self.number), str(path))

    def make_folder(self, path: Path) -> None:
        self._call("make_folder", path)
        super().make_folder(path)

    def write_bytes(self, path: Path, data: bytes) -> None:
        self._call("write_bytes", path)
        super().write_bytes(path, data)

    def write_tensors(self, path: Path, tensors: Any) -> None:
        self._call("write_tensors", path)
        super().write_tensors(path, tensors)

    def sync(self, path: Path) -> None:
        self._call("sync", path)
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename", source)
        super().rename(source, target)


# What a save asks of the disk: of a new step, and of one that is there already.
WRITES = ["make_folder", "make_folder", "sync", "write_tensors", "write_tensors", "write_bytes", "write_bytes"]
NEW = [*WRITES, *["sync"] * 5, "rename", "sync"]
AGAIN = [*WRITES, *["sync"] * 5, "rename", "rename", "sync"]


@pytest.mark.parametrize(("step", "calls"), [(3, NEW), (2, AGAIN)], ids=["new", "again"])
def test_a_save_syncs_every_file_and_folder_before_the_rename_and_the_store_after_it(
    tmp_path: Path, step: int, calls: list[str]
) -> None:
    filled(tmp_path, 1, 2)
    files = FailingFiles()
    filled(tmp_path, step, files=files)
    assert files.calls == calls


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fail_at", range(len(NEW)), ids=lambda index: f"{index}-{NEW[index]}")
def test_a_disk_that_is_full_at_any_moment_leaves_the_older_ones_intact(
    tmp_path: Path, fail_at: int, forever: bool
) -> None:
    filled(tmp_path, 1, 2)
    before = contents(tmp_path)
    store = CheckpointStore(tmp_path, keep_last=1, files=FailingFiles(fail_at, forever=forever))
    with pytest.raises(CheckpointError, match="could not save the checkpoint of step 3"):
        store.save(3, groups(3), state(3))
    renamed = fail_at > NEW.index("rename")
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002"] + ["step-000003"] * renamed
    assert_holds(store.latest(), 3 if renamed else 2)
    assert_holds(filled(tmp_path, 3).latest(), 3)


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fail_at", range(len(AGAIN)), ids=lambda index: f"{index}-{AGAIN[index]}")
def test_a_disk_that_is_full_while_a_step_is_replaced_keeps_one_of_the_two(
    tmp_path: Path, fail_at: int, forever: bool
) -> None:
    filled(tmp_path, 1, 2)
    store = CheckpointStore(tmp_path, files=FailingFiles(fail_at, forever=forever))
    with pytest.raises(CheckpointError, match="could not save the checkpoint of step 2"):
        store.save(2, groups(22), state(22))
    found = store.latest()
    assert found is not None and found.step == 2
    new = fail_at == len(AGAIN) - 1
    assert found.state() == state(22 if new else 2)
    left = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    # The old one waits beside the new until that is known to be on the disk, or where it could not be put back.
    waits = new or (forever and fail_at == len(AGAIN) - 2)
    assert left == [".replaced-step-000002"] * waits
    filled(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002", "step-000003"]
    assert CheckpointStore(tmp_path).load(2).state() == state(22 if new else 2)


def test_the_message_of_a_full_disk_says_what_where_how_much_and_what_to_do(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, files=FailingFiles(3))
    with pytest.raises(CheckpointError) as caught:
        store.save(40, {"model": {"weight": torch.zeros(500_000)}}, {})
    message = str(caught.value)
    assert (
        f"could not save the checkpoint of step 40 in {tmp_path}: No space left on device; it needs 2.0 MB, " in message
    )
    assert message.endswith(
        "are free. Older checkpoints are intact. Free some space or keep fewer checkpoints, then resume."
    )
    assert "\n" not in message
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EACCES, "Choose a folder that you can write to."), (errno.EIO, "Check the disk")]
)
def test_other_refusals_get_other_advice(tmp_path: Path, number: int, advice: str) -> None:
    store = CheckpointStore(tmp_path, files=FailingFiles(0, number=number))
    with pytest.raises(CheckpointError, match=advice):
        store.save(1, groups(), {})


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="Choose a folder that you can write to"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, groups(), {})
    with pytest.raises(CheckpointError, match="Choose a folder that you can write to"):
        CheckpointStore(tmp_path / "file").save(1, groups(), {})
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_that_cannot_be_read_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=f"cannot read the checkpoints in {tmp_path}: Permission denied"):
        CheckpointStore(tmp_path).latest()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Choose a folder that you can write to"):
        CheckpointStore(tmp_path).save(1, groups(), {})


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("large", ["tensors", "state"])
def test_a_write_that_the_kernel_refuses_leaves_nothing_behind(tmp_path: Path, large: str) -> None:
    store = filled(tmp_path, 1)
    before = contents(tmp_path)
    tensors = {"model": {"weight": torch.zeros(500_000)}} if large == "tensors" else groups()
    with largest_file(100_000), pytest.raises(CheckpointError, match="File too large; it needs"):
        store.save(2, tensors, {"text": "x" * 200_000})
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["step-000001"]


ON_A_FULL_DISK = """
import os, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from checkpoint_cases import contents, filled
from scalelong.runs.checkpoint import CheckpointError

folder = Path(sys.argv[1])
store = filled(folder, 1)
before = contents(folder)
for count in range(0, 300_000, 20_000):
    try:
        store.save(2, {"model": {"weight": torch.zeros(count)}, "ema": {"weight": torch.zeros(count)}}, {})
    except CheckpointError as error:
        assert "No space left on device" in str(error), error
        assert count and contents(folder) == before
        raise SystemExit(0)
    store.discard_after(1)
raise SystemExit("the disk was never full")
"""


@pytest.mark.slow
def test_a_real_disk_that_is_full_leaves_the_older_one_intact(tmp_path: Path) -> None:
    own_mounts = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0"'
    if not shutil.which("unshare") or subprocess.run([*own_mounts, mount, tmp_path], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    script = f'{mount} && exec "$@"'
    command = [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path), str(Path(__file__).parents[1])]
    done = subprocess.run([*own_mounts, script, str(tmp_path), *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_interrupted_save_leaves_nothing_behind(tmp_path: Path) -> None:
    class Interrupted(Files):
        def write_bytes(self, path: Path, data: bytes) -> None:
            raise KeyboardInterrupt

    filled(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        CheckpointStore(tmp_path, files=Interrupted()).save(2, groups(), {})
    assert os.listdir(tmp_path) == ["step-000001"]


def test_a_failed_removal_of_an_old_one_is_logged_and_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(Files):
        def remove(self, path: Path) -> None:
            raise OSError(errno.EBUSY, "busy", str(path))

    filled(tmp_path, 1)
    store = CheckpointStore(tmp_path, keep_last=1, files=Stuck())
    with caplog.at_level(logging.WARNING):
        store.save(2, groups(2), state(2))
    assert_holds(store.latest(), 2)
    assert "could not remove" in caplog.text
    assert filled(tmp_path, 3).steps() == [2, 3]


# One interpreter imports torch once; its forks save without pause and are killed at random moments.
KILL_REPEATEDLY = """
import os, random, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from checkpoint_cases import CheckpointStore, groups, state

torch.set_num_threads(1)
folder, chance = Path(sys.argv[1]), random.Random(0)

def save_forever(step):
    store = CheckpointStore(folder, keep_last=2)
    while True:
        # Every third save replaces the one before it.
        step += step % 3 != 0 or chance.random() < 0.5
        tensors = groups(step) | {"large": {"x": torch.full((200_000,), float(step))}}
        store.save(step, tensors, state(step), metric=chance.random())

def wait_for_save(step):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        names = os.listdir(folder) if folder.exists() else []
        if any(name.startswith("step-") and int(name[5:]) > step for name in names):
            return
        time.sleep(0.002)

leftovers = reached = 0
for kill in range(12):
    child = os.fork()
    if not child:
        save_forever(reached)
    if kill % 2:  # On a busy machine nothing would be saved within the time that follows.
        wait_for_save(reached)
    time.sleep(0.15 * chance.random())
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "a save failed by itself"
    leftovers += any(name.startswith(".") for name in os.listdir(folder)) if folder.exists() else 0
    store = CheckpointStore(folder, keep_last=2)
    found = store.latest()
    if found is None:
        assert reached == 0, "everything was lost"
        continue
    assert found.step >= reached, (found.step, reached)
    reached = found.step
    assert found.state() == state(reached)
    assert found.tensors("large")["x"].eq(reached).all()
    for group, tensors in groups(reached).items():
        assert all(torch.equal(found.tensors(group)[name], tensor) for name, tensor in tensors.items())
    for path in folder.glob("step-*"):
        store.load(path)  # Raises unless a folder under its own name is complete.
store.save(reached + 1, groups(reached + 1), state(reached + 1))
assert not any(name.startswith(".") for name in os.listdir(folder))
print(reached, leftovers)
"""


def test_a_save_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILL_REPEATEDLY, str(tmp_path / "store"), str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    reached, leftovers = map(int, done.stdout.split())
    assert reached > 2, "the forks must have saved"
    assert leftovers > 0, "at least one kill must have hit a save"


def test_leftovers_of_killed_saves_are_ignored_and_cleaned_by_the_next(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "step-000002", tmp_path / ".tmp-step-000003-99")
    (tmp_path / ".tmp-step-000004-99").mkdir()
    assert_holds(store.latest(), 2)
    store.save(5, groups(5), state(5))
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002", "step-000005"]


def test_a_step_that_had_stepped_aside_when_its_replacement_was_killed_is_found_and_put_back(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    (tmp_path / "step-000002").rename(tmp_path / ".replaced-step-000002")
    assert_holds(store.latest(), 2)
    store.save(3, groups(3), state(3))
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002", "step-000003"]
    assert_holds(store.load(2), 2)


def test_sizes_read_well() -> None:
    assert [human_size(size) for size in (0, 999, 1000, 2_340_000, 10**9, 4 * 10**15)] == [
        *("0 bytes", "999 bytes", "1.0 kB", "2.3 MB", "1.0 GB", "4000.0 TB")
    ]
