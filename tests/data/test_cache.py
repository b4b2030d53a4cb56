"""Laws of the image cache: the images of the set in memory, complete or absent, and opened without the source."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from image_cases import config, pictures, saved, write_parquet, write_tar, write_zip
from prepare_cases import contents, damage, save_pictures

from scalelong.data import Batches, BatchOrder, DataConfig, DataError, ImageSet, dataset, decode, load_images, prepare
from scalelong.data.config import LatentConfig
from scalelong.data.dataset import cache_folder, cache_root, open_images
from scalelong.data.prepared import PreparedSet, prepared_folder

CACHED = {"memory_gb": 0, "label_column": "label", "caption_column": "captions"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_pictures(tmp_path / "pictures.parquet", 120, broken=[70])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen images in each."""
    monkeypatch.setattr(prepare, "IMAGES_BYTES", 16 * 3 * 6 * 6)


def no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "open_parts", lambda *_: pytest.fail("the source was opened again"))


def assert_same(found: ImageSet | PreparedSet, expected: ImageSet) -> None:
    assert len(found) == len(expected)
    indices = torch.randint(len(expected), (200,))
    seeds = torch.randint(2**63 - 1, (200,))
    ours, theirs = found.pick(indices, seeds), expected.pick(indices, seeds)
    assert torch.equal(ours.images, theirs.images) and ours.images.dtype == torch.uint8
    assert ours.captions == theirs.captions and (ours.labels is None) == (theirs.labels is None)
    assert ours.labels is None or torch.equal(ours.labels, theirs.labels)  # type: ignore[arg-type]


def test_the_cache_holds_the_images_labels_and_captions_of_the_set_in_memory(
    source: Path, small_blocks: None, caplog: Any
) -> None:
    settings = config(source, **CACHED)
    memory = load_images(settings)
    train, validation = open_images(settings)
    assert isinstance(train, PreparedSet) and isinstance(validation, PreparedSet)
    assert len(list(cache_folder(settings).glob("train-*.safetensors"))) == 8
    assert_same(train, memory.train)
    assert_same(validation, memory.validation)
    assert train.captions is not None and tuple(train.captions) == memory.train.captions
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2 and warnings[0] == warnings[1] and "1 of 120 images" in warnings[0]


def member(name: str, image: bytes) -> dict[str, bytes]:
    return {name: image, name.replace("png", "cls"): b"3"}


@pytest.mark.parametrize("kind", ["zip", "folder", "tar", "digits"])
def test_every_source_can_be_cached(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "IMAGES_BYTES", (400 if kind == "digits" else 16) * 3 * 6 * 6)
    files = {f"{name}/{row}.png": saved(item) for row, item in enumerate(pictures(12)) for name in ("cat", "dog")}
    place: Any = tmp_path / f"some.{kind}"
    columns = {"label_column": "label"}
    if kind == "zip":
        write_zip(place, files)
    elif kind == "folder":
        for name, content in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
    elif kind == "tar":
        named = ((name.replace("/", "-"), content) for name, content in files.items())
        write_tar(place, {key: value for name, image in named for key, value in member(name, image).items()})
        columns = {"image_column": "png", "label_column": "cls"}
    else:
        place = "sklearn:digits"
    settings = config(place, memory_gb=0, validation_count=5, **columns)
    memory, cached = load_images(settings), open_images(settings)
    assert_same(cached[0], memory.train)
    assert_same(cached[1], memory.validation)


def test_batches_are_equal_to_the_bit_wherever_the_images_are(source: Path, small_blocks: None) -> None:
    settings = config(source, **CACHED)
    data, cached = load_images(settings).train, open_images(settings)[0]
    order = BatchOrder(len(data), 50, seed=1)
    plain, mapped = Batches(data, order, flip=True), Batches(cached, order, flip=True)
    for step in [0, 1, 2, 7, 7, 3, 4]:
        one, other = plain.at(step), mapped.at(step)
        assert torch.equal(one.images, other.images) and one.captions == other.captions


def test_what_fits_in_memory_is_there_and_nothing_is_written(source: Path) -> None:
    for memory_gb in (None, 120 * 3 * 6 * 6 / 1e9):
        train, validation = open_images(config(source, memory_gb=memory_gb))
        assert isinstance(train, ImageSet) and isinstance(validation, ImageSet)
    assert not cache_root().exists()
    train, _ = open_images(config(source, memory_gb=119 * 3 * 6 * 6 / 1e9))
    assert isinstance(train, PreparedSet)


@pytest.mark.parametrize(("processes", "kept"), [("1", ImageSet), ("3", PreparedSet)])
def test_half_of_the_free_memory_is_shared_by_the_processes_of_a_machine(
    source: Path, monkeypatch: pytest.MonkeyPatch, processes: str, kept: type
) -> None:
    import psutil

    class Free:
        available = 4 * 120 * 3 * 6 * 6

    monkeypatch.setattr(psutil, "virtual_memory", Free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert isinstance(open_images(config(source))[0], kept)


def test_a_complete_cache_is_opened_without_the_source_even_where_the_images_fit_in_memory(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(source, **CACHED)
    open_images(settings)
    no_source(monkeypatch)
    train, _ = open_images(settings.model_copy(update={"memory_gb": None, "workers": 1, "flip": True}))
    assert isinstance(train, PreparedSet)


CHANGES = {
    "image_size": 5,
    "fit": "pad",
    "channels": 1,
    "label_column": None,
    "validation_count": 3,
    "box": [0, 0, 9, 9],
}


@pytest.mark.parametrize("change", ["source", *CHANGES])
def test_other_images_have_a_folder_of_their_own(source: Path, change: str) -> None:
    settings = config(source, **CACHED)
    before = cache_folder(settings)
    if change == "source":
        save_pictures(source, 120, seed=1)
    else:
        settings = settings.model_copy(update={change: CHANGES[change]})
    assert cache_folder(settings) != before
    assert cache_folder(settings).parent == cache_root() / "images"


def test_the_folder_follows_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    settings = config(save_pictures(tmp_path / "some[1].parquet"))
    before = cache_folder(settings)
    save_pictures(tmp_path / "some[1].parquet", 12)
    assert cache_folder(settings) != before


def test_a_folder_without_a_box_has_the_name_it_had_before_there_were_boxes() -> None:
    settings = DataConfig(source="sklearn:digits", image_size=8, channels=1, label_column="label")
    assert cache_folder(settings).name == "sklearn-digits-22853360"
    assert prepared_folder("mine", settings, None, LatentConfig(autoencoder="owner/name")) == Path(
        "prepared/mine-7ca87833"
    )


def test_the_folder_follows_a_file_that_is_added_to_an_image_folder(tmp_path: Path) -> None:
    (tmp_path / "set" / "cat").mkdir(parents=True)
    places = set()
    for row, item in enumerate(pictures(3)):
        item.save(tmp_path / "set" / "cat" / f"{row}.png")
        places.add(cache_folder(config(tmp_path / "set")))
        (tmp_path / "set" / ".hidden").write_text(str(row))
        places.add(cache_folder(config(tmp_path / "set")))
    assert len(places) == 3


def test_a_cache_that_was_stopped_is_resumed_and_has_the_same_bytes(
    source: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = config(source, **CACHED)
    open_images(settings)
    whole = contents(cache_folder(settings))
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "other"))

    def stop(done: int, total: int) -> None:
        if done > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_images(settings, progress=stop)
    made = {file: file.stat().st_mtime_ns for file in cache_folder(settings).glob("*.safetensors")}
    assert len(made) == 3
    open_images(settings)
    assert contents(cache_folder(settings)) == whole
    assert made.items() <= {file: file.stat().st_mtime_ns for file in cache_folder(settings).glob("*")}.items()


def test_progress_counts_every_image(source: Path, small_blocks: None) -> None:
    calls: list[tuple[int, int]] = []
    open_images(config(source, **CACHED), progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls) and {done for done, _ in calls} == set(range(121)) and calls[-1] == (120, 120)


def test_a_damaged_cache_is_mended(source: Path, small_blocks: None) -> None:
    settings = config(source, **CACHED)
    open_images(settings)
    whole = contents(cache_folder(settings))
    damage(cache_folder(settings) / "train-00002.safetensors")
    train, _ = open_images(settings)
    assert_same(train, load_images(settings).train)
    assert contents(cache_folder(settings)) == whole


def test_what_the_disk_cannot_hold_is_refused_with_what_to_do(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "free_space", lambda path: 12_345)
    with pytest.raises(DataError) as caught:
        open_images(config(source, **CACHED))
    folder = cache_folder(config(source, **CACHED))
    assert str(caught.value) == (
        f"data.source: 120 images take 13.0 kB in the image cache, {folder}, but only 12.3 kB are free there. Free "
        "some space, let SCALELONG_CACHE name a folder on a larger disk, set a smaller data.image_size, or a larger "
        "data.memory_gb if there is enough memory"
    )
    assert not list(folder.parent.glob("*/*"))


@pytest.mark.parametrize("cached", [False, True])
def test_labels_and_captions_are_refused_before_anything_is_decoded(
    source: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    settings = config(source, **CACHED)
    if cached:
        open_images(settings, classes=3)
    monkeypatch.setattr(decode, "decode", lambda *_: pytest.fail("an image was decoded"))
    message = r"data.label_column: labels must lie in 0 … 1 \((row|image) \d+: 2, .*\)"
    with pytest.raises(DataError, match=message):
        open_images(settings, classes=2)


def test_more_than_one_percent_of_broken_images_are_an_error_and_leave_no_cache(tmp_path: Path) -> None:
    settings = config(save_pictures(tmp_path / "some.parquet", 120, broken=[3, 4]), memory_gb=0)
    for _ in range(2):
        with pytest.raises(DataError, match=r"2 of 120 images .* more than 1 % stops the run"):
            open_images(settings)
    assert not list(cache_folder(settings).glob("*.safetensors"))


def test_whoever_comes_while_the_cache_is_filled_waits_for_it(source: Path, small_blocks: None) -> None:
    settings, entered, go = config(source, **CACHED), Event(), Event()
    lock = FileLock(cache_folder(settings).with_name(f"{cache_folder(settings).name}.lock"))
    seen: list[int] = []

    def hold(done: int, total: int) -> None:
        if done > 40:
            entered.set()
            assert go.wait(60)

    def progress(done: int, total: int) -> None:
        seen.append(done)
        go.set()

    # A thread has a lock of its own, as a process has.
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(open_images, settings, progress=hold)
        assert entered.wait(60)
        with pytest.raises(Timeout):
            lock.acquire(timeout=0)
        train, _ = open_images(settings, progress=progress)
        assert len(other.result(60)[0]) == len(train)
    # It showed how far the other was, and decoded nothing itself.
    assert seen and seen == sorted(seen) and set(seen) <= {*range(0, 120, 16), 120}
    assert_same(train, load_images(settings).train)
    with lock.acquire(timeout=0):
        assert lock.is_locked


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"SCALELONG_CACHE": "/large/disk"}, "/large/disk"),
        ({"SCALELONG_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/scalelong"),
        ({"SCALELONG_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/someone"}, "/home/someone/.cache/scalelong"),
    ],
)
def test_the_place_of_the_cache(variables: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(place)


OPEN = """
import json, re, resource, sys, time
import torch
from pathlib import Path
from scalelong.data import DataConfig, dataset
def memory(): return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
config = DataConfig(**json.loads(sys.argv[1]))
dataset.open_parts = lambda *_: sys.exit("the source was opened again")
before, started = memory(), time.monotonic()
train, validation = dataset.open_images(config)
opened, seconds = memory() - before, time.monotonic() - started
train.pick(torch.randint(len(train), (256,)), torch.zeros(256, dtype=torch.int64))
print(json.dumps([len(train), seconds, opened]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the memory of a process")
def test_a_cached_set_of_100_000_images_opens_in_five_seconds_and_needs_no_memory(tmp_path: Path) -> None:
    import numpy

    found = []
    for count in (10_000, 100_000):
        archive = tmp_path / f"{count}.parquet"
        noise = numpy.random.default_rng(0).integers(0, 256, (100, 32, 32, 3), dtype=numpy.uint8)
        from PIL import Image

        images = [{"bytes": saved(Image.fromarray(one), "BMP"), "path": None} for one in noise]
        write_parquet(archive, image=images * (count // 100), label=list(range(count)))
        settings = DataConfig(source=str(archive), image_size=32, label_column="label", memory_gb=0)
        open_images(settings)
        command = [sys.executable, "-c", OPEN, json.dumps(settings.model_dump())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    (_, _, small), (rows, seconds, large) = found
    assert rows == 100_000 - 512 and seconds < 5
    # 307 MB of images, in ten times as many rows.
    assert large - small < 20 << 20 and large < 60 << 20, found
