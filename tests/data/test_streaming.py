"""Laws of streams: the images of the set in memory, each once in an epoch, and resumed as if never stopped."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from image_cases import config, encoded, pictures, saved, write_parquet, write_tar, write_zip
from torch import Tensor

from scalelong.data import (
    Batch,
    BatchDraws,
    Batches,
    DataError,
    ImageSet,
    ImageStream,
    StreamBatches,
    load_images,
    load_stream,
    open_batches,
)
from scalelong.data.shards import HubShards
from scalelong.diffusion import to_uint8

ROWS, HELD = 60, 7
SIDES = {"label_column": "label", "caption_column": "text"}
FIELDS = {"image_column": "png", "label_column": "cls", "caption_column": "txt"}

Known = dict[int, tuple[Tensor, tuple[str, ...]]]


# What is opened is not changed by reading it, and opening takes longer than most of what the tests do with it.
opened = functools.cache(load_stream)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("stream") / "set")


def write_set(folder: Path, kind: str = "parquet", *, broken: tuple[int, ...] = ()) -> Path:
    """Images with the number of their row as label and in their captions, in four files of different sizes."""
    items = [b"no image" if row in broken else saved(item) for row, item in enumerate(pictures(ROWS))]
    for file, part in enumerate(torch.arange(ROWS).tensor_split([5, 20, 42])):
        rows = part.tolist()
        if kind == "parquet":
            images = [{"bytes": items[row], "path": f"{row}.png"} for row in rows]
            texts = [[f"{row} a", f"{row} b"] for row in rows]
            write_parquet(folder / f"train-{file}.parquet", image=images, label=rows, text=texts)
        else:
            triples = ((f"{row}", items[row], b"%d" % row, b"%d a" % row) for row in rows)
            members = [
                {f"{key}.png": image, f"{key}.cls": number, f"{key}.txt": text} for key, image, number, text in triples
            ]
            write_tar(folder / f"train-{file}.tar", {name: data for some in members for name, data in some.items()})
    return folder


def stream_of(
    source: Any, *, size: int = 8, rank: int = 0, world: int = 1, seed: int = 3, **options: Any
) -> StreamBatches:
    settings = config(source, **{"shuffle_buffer": 16, **SIDES, **options})
    return StreamBatches(opened(settings).train, BatchDraws(size, seed), flip=settings.flip, rank=rank, world=world)


def taken(batches: StreamBatches, count: int) -> list[Batch]:
    """The next batches, after which the threads end."""
    found = list(itertools.islice(batches, count))
    batches.close()
    return found


def labels_of(batches: list[Batch]) -> list[int]:
    return torch.cat([labels for batch in batches if (labels := batch.labels) is not None]).tolist()


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.step == theirs.step
        assert torch.equal(ours.images, theirs.images)
        assert ours.labels is not None and torch.equal(ours.labels, theirs.labels)
        assert ours.captions is not None and ours.captions == theirs.captions


def known_by_label(*sets: ImageSet) -> Known:
    """Pixels and captions of each image by its label, which is the number of its row."""
    known: Known = {}
    for some in sets:
        assert some.labels is not None and some.captions is not None
        known |= dict(zip(some.labels.tolist(), zip(some.images, some.captions, strict=True), strict=True))
    return known


@pytest.mark.parametrize(("kind", "columns"), [("parquet", SIDES), ("tar", FIELDS)])
def test_a_stream_has_the_images_labels_and_captions_of_the_set_in_memory(
    tmp_path: Path, kind: str, columns: dict[str, str]
) -> None:
    settings = config(write_set(tmp_path / "set", kind), validation_count=HELD, shuffle_buffer=16, **columns)
    memory, data = load_images(settings), load_stream(settings)
    known = known_by_label(memory.train, memory.validation)
    (batch,) = taken(StreamBatches(data.train, BatchDraws(ROWS - HELD, seed=0)), 1)
    assert batch.labels is not None and batch.captions is not None
    # The first rows are held out, and all others are one epoch: the first file, and two rows of the second.
    assert sorted(batch.labels.tolist()) == list(range(HELD, ROWS))
    for label, image, caption in zip(batch.labels.tolist(), to_uint8(batch.images), batch.captions, strict=True):
        assert torch.equal(image, known[label][0]) and caption in known[label][1]
    held = known_by_label(data.validation)
    assert list(held) == list(range(HELD))
    assert all(torch.equal(held[row][0], known[row][0]) and held[row][1] == known[row][1] for row in held)


@pytest.mark.parametrize("kind", ["folder", "zip", "digits"])
def test_images_in_files_are_streamed_as_the_set_in_memory_and_hold_out_the_same(tmp_path: Path, kind: str) -> None:
    files = {f"{name}/{row}.png": saved(item) for row, item in enumerate(pictures(12)) for name in ("cat", "dog")}
    source: Any = "sklearn:digits" if kind == "digits" else tmp_path / "some.zip"
    if kind == "zip":
        write_zip(source, files)
    if kind == "folder":
        source = tmp_path / "images"
        for name, content in files.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(content)
    settings = config(source, label_column="label", validation_count=5, shuffle_buffer=100)
    memory, data = load_images(settings), load_stream(settings)
    assert torch.equal(data.validation.images, memory.validation.images)
    assert torch.equal(data.validation.labels, memory.validation.labels)  # type: ignore[arg-type]
    (batch,) = taken(StreamBatches(data.train, BatchDraws(len(memory.train), seed=0)), 1)
    assert batch.labels is not None and memory.train.labels is not None
    streamed = zip(to_uint8(batch.images), batch.labels.tolist(), strict=True)
    in_memory = zip(memory.train.images, memory.train.labels.tolist(), strict=True)
    rows = [Counter((image.numpy().tobytes(), label) for image, label in some) for some in (streamed, in_memory)]
    assert rows[0] == rows[1]


def test_every_epoch_has_every_row_once_and_an_order_of_its_own(folder: Path) -> None:
    size = ROWS - 2
    epochs = [labels_of([batch]) for batch in taken(stream_of(folder, size=size), 3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(2, ROWS))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert labels_of(taken(stream_of(folder, size=size, seed=4), 1)) not in epochs


def test_rows_are_shuffled_within_blocks_and_files_among_each_other(folder: Path) -> None:
    epoch = labels_of(taken(stream_of(folder, size=ROWS - 2), 1))
    blocks = [epoch[start : start + 16] for start in range(0, len(epoch), 16)]
    assert all(block != sorted(block) for block in blocks)
    # Unshuffled files would put the first rows into the first block.
    assert sorted(blocks[0]) != list(range(2, 18))
    epochs = [labels_of([batch]) for batch in taken(stream_of(folder, size=ROWS - 2, shuffle_buffer=1), 5)]
    files = [[*range(2, 5)], [*range(5, 20)], [*range(20, 42)], [*range(42, ROWS)]]
    orders = [sum(order, []) for order in itertools.permutations(files)]
    assert all(unshuffled in orders for unshuffled in epochs)
    assert len({tuple(unshuffled) for unshuffled in epochs}) > 1


@pytest.mark.parametrize("stop", [1, 2, 5, 8, 11, 15, 20])
def test_a_stream_stopped_anywhere_and_resumed_goes_on_as_if_uninterrupted(folder: Path, stop: int) -> None:
    # Batches of 8 and blocks of 16 rows: stops at the start, in the middle and at the end of blocks and epochs.
    uninterrupted = taken(stream_of(folder), 24)
    stopped = stream_of(folder)
    taken(stopped, stop)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = stream_of(folder)
    resumed.load_state_dict(state)
    assert_same(taken(resumed, 24 - stop), uninterrupted[stop:])


@pytest.mark.parametrize(("world", "stop"), [(2, 5), (3, 4)])
def test_the_streams_of_several_processes_resume_too(folder: Path, world: int, stop: int) -> None:
    for rank in range(world):
        share = {"size": 6, "rank": rank, "world": world}
        stopped, resumed = stream_of(folder, **share), stream_of(folder, **share)
        taken(stopped, stop)
        resumed.load_state_dict(stopped.state_dict())
        assert_same(taken(resumed, 12), taken(stream_of(folder, **share), stop + 12)[stop:])


def test_a_state_does_not_depend_on_what_was_read_ahead(folder: Path) -> None:
    batches = stream_of(folder)
    batches.at(0)
    at_once = batches.state_dict()
    # Long enough for the thread to fill its queue.
    time.sleep(0.2)
    assert batches.state_dict() == at_once
    batches.close()
    assert batches.state_dict() == at_once


def test_a_running_stream_goes_back_to_a_state(folder: Path) -> None:
    batches = stream_of(folder)
    first, state = [batches.at(0), batches.at(1)], batches.state_dict()
    later = [batches.at(2), batches.at(3)]
    batches.load_state_dict(state)
    assert_same(taken(batches, 2), later)
    assert len(first) == 2


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_the_rows_of_all_processes_are_disjoint_and_together_the_epoch(folder: Path, world: int) -> None:
    shares = []
    for rank in range(world):
        batches = stream_of(folder, size=world, rank=rank, world=world)
        own = []
        while batches.state_dict()["start"]["epoch"] == 0:
            own += labels_of([batches.at(len(own))])
        batches.close()
        # The batch that told that the epoch is over is of the next.
        shares.append(own[:-1])
    assert sorted(sum(shares, [])) == list(range(2, ROWS))


def test_a_single_file_is_shared_evenly(tmp_path: Path) -> None:
    rows = list(range(42))
    file = write_parquet(tmp_path / "one.parquet", image=encoded(pictures(42)), label=rows)
    parts = [
        labels_of(taken(stream_of(file, size=40, rank=rank, world=2, caption_column=None), 1)) for rank in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == rows[2:]


@pytest.mark.parametrize("workers", [2, 5])
def test_the_number_of_threads_does_not_change_the_batches(folder: Path, workers: int) -> None:
    assert_same(taken(stream_of(folder, workers=workers), 10), taken(stream_of(folder, workers=1), 10))


def test_images_are_mirrored_and_captions_drawn_by_step_and_seed(folder: Path) -> None:
    draws = BatchDraws(8, seed=3)
    plain, flipped = taken(stream_of(folder), 9), taken(stream_of(folder, flip=True), 9)
    for batch, other in zip(plain, flipped, strict=True):
        chosen = draws.flips(batch.step)
        assert torch.equal(other.images[chosen], batch.images[chosen].flip(-1))
        assert torch.equal(other.images[~chosen], batch.images[~chosen])
        letters = ["ab"[seed % 2] for seed in draws.seeds(batch.step).tolist()]
        assert batch.captions == tuple(
            f"{label} {letter}" for label, letter in zip(labels_of([batch]), letters, strict=True)
        )


def test_broken_images_are_skipped_named_and_replaced_by_the_next(tmp_path: Path, caplog: Any) -> None:
    # A stream of 58 rows with one broken has more than 1 %, which only a longer one would tolerate.
    source = write_set(tmp_path / "set", broken=(30,))
    batches = stream_of(source, size=57)
    (batch,) = taken(batches, 1)
    assert sorted(labels_of([batch])) == [row for row in range(2, ROWS) if row != 30]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "row 10 of file 2 (30.png): UnidentifiedImageError" in record.getMessage()
    batches = stream_of(source, size=57)
    with pytest.raises(DataError, match=r"data.source: 1 of 58 images .* more than 1 % stops the run"):
        list(batches)
    batches.close()


def test_one_broken_image_among_those_held_out_is_left_out_and_named(tmp_path: Path, caplog: Any) -> None:
    source = write_set(tmp_path / "set", broken=(1,))
    assert len(load_stream(config(source)).validation) == 1
    (record,) = caplog.records
    assert "skipped: 1 of 2 images" in record.getMessage() and "row 1 of file 0 (1.png)" in record.getMessage()


@pytest.mark.parametrize(("broken", "count"), [((0,), 1), ((0, 1), 2), ((0, 1), 3)])
def test_validation_images_of_which_none_is_left_or_several_are_broken_stop_the_run(
    tmp_path: Path, broken: tuple[int, ...], count: int
) -> None:
    source = write_set(tmp_path / "set", broken=broken)
    with pytest.raises(DataError, match=rf"data.source: {len(broken)} of {count} images .*row 0 of file 0 \(0.png\)"):
        load_stream(config(source, validation_count=count))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_column": "img"}, "data.image_column: there is no column 'img'; did you mean 'image'?"),
        ({"image_column": "label"}, r"data.image_column: the column 'label' holds Value\('int64'\), not images"),
        (
            {"label_column": "text"},
            r"data.label_column: the column 'text' holds .* not whole numbers \(row 0 of file 0",
        ),
        ({"caption_column": "label"}, r"data.caption_column: the column 'label' holds .*, not a text or a list"),
        ({"train_split": "trian"}, "data.train_split: there is no split 'trian'; did you mean 'train'?"),
        ({"validation_split": "test"}, "data.validation_split: there is no split 'test'"),
        (
            {"validation_count": ROWS},
            f"data.validation_count: holding out {ROWS} of {ROWS} images leaves none to train on",
        ),
        ({"validation_count": 999}, f"data.validation_count: holding out 999 of {ROWS} images leaves none to train on"),
    ],
)
def test_what_a_stream_does_not_have_is_named_before_it_begins(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_stream(config(folder, **options))


def test_a_label_of_a_tar_that_is_out_of_range_is_named_when_its_block_is_read(tmp_path: Path) -> None:
    data = load_stream(config(write_set(tmp_path / "set", "tar"), **FIELDS), classes=50)
    batches = StreamBatches(data.train, BatchDraws(ROWS, seed=0))
    with pytest.raises(DataError, match=r"labels must lie in 0 … 49 \(row 8 of file 3 \(50.png\): 50, .* and 5 more"):
        batches.at(0)
    batches.close()


def test_a_source_whose_columns_are_not_known_beforehand_cannot_be_streamed() -> None:
    rows = datasets.IterableDataset.from_generator(lambda: iter([{"image": b""}]))
    with pytest.raises(DataError, match="data.streaming: the columns of this source are only known once it is read"):
        HubShards(rows)


def test_all_labels_and_captions_of_parquet_files_are_checked_before_a_stream_begins(tmp_path: Path) -> None:
    source = write_set(tmp_path / "set")
    with pytest.raises(
        DataError, match=r"data.label_column: labels must lie in 0 … 49 \(row 8 of file 3: 50, .* and 5 more"
    ):
        load_stream(config(source, **SIDES), classes=50)
    write_parquet(source / "train-9.parquet", image=encoded(pictures(2)), label=[0, 1], text=[["a"], ["b", ""]])
    with pytest.raises(DataError, match=r"data.caption_column: there are empty captions \(row 1 of file 4\)"):
        load_stream(config(source, **SIDES))


def test_the_labels_of_images_in_files_are_all_checked_before_a_stream_begins() -> None:
    with pytest.raises(DataError, match=r"data.label_column: labels must lie in 0 … 8 \(row 9: 9"):
        load_stream(config("sklearn:digits", label_column="label"), classes=9)


@pytest.mark.parametrize("streaming", [False, True])
def test_one_call_opens_a_set_in_memory_or_a_stream(folder: Path, streaming: bool) -> None:
    settings = config(folder, streaming=streaming, flip=True, validation_count=4, **SIDES)
    batches, validation = open_batches(settings, BatchDraws(6, seed=3), rank=1, world=2)
    assert isinstance(batches, StreamBatches if streaming else Batches)
    assert batches.own == slice(3, 6) and batches.flip and len(validation) == 4
    batch = batches.at(0)
    assert len(batch) == 3 and batch.labels is not None and batch.captions is not None
    assert not set(batch.labels.tolist()) & set(known_by_label(validation))
    batches.close()


def test_steps_of_a_stream_come_one_after_another(folder: Path) -> None:
    batches = stream_of(folder)
    with pytest.raises(ValueError, match="one batch after another: the next is 0, not 3"):
        batches.at(3)
    batches.at(0)
    with pytest.raises(ValueError, match="the next is 1, not 0"):
        batches.at(0)
    batches.close()


def test_a_state_of_other_data_or_other_processes_is_refused(folder: Path) -> None:
    streamed = stream_of(folder)
    in_memory, _ = open_batches(config(folder), BatchDraws(8, seed=3))
    assert in_memory.state_dict() == {}
    in_memory.load_state_dict({})
    with pytest.raises(ValueError, match="set data.streaming: true"):
        in_memory.load_state_dict(streamed.state_dict())
    with pytest.raises(ValueError, match="begun without data.streaming"):
        streamed.load_state_dict({})
    with pytest.raises(ValueError, match="process 0 of 1 cannot be resumed by process 1 of 2: .* as many processes"):
        stream_of(folder, rank=1, world=2).load_state_dict(streamed.state_dict())


def test_a_process_without_rows_says_so(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "one.parquet", image=encoded(pictures(3)), label=[0, 1, 2])
    batches = [stream_of(file, size=2, rank=rank, world=2, caption_column=None) for rank in range(2)]
    config_errors = []
    for some in batches:
        try:
            some.at(0)
        except DataError as error:
            config_errors.append(str(error))
        some.close()
    assert len(config_errors) == 1 and "there are no rows for process" in config_errors[0]


class SlowShards:
    """One file without end, of which all rows but the first 20 take their time."""

    columns = ("image",)

    def __len__(self) -> int:
        return 1

    def kind(self, column: str) -> str:
        return "images"

    def narrow(self, image: str, others: Any) -> SlowShards:
        return self

    def read(self, shard: int, start: int = 0) -> Iterator[dict[str, Any]]:
        for row in itertools.count(start):
            time.sleep(0 if row < 20 else 0.05)
            yield {"image": torch.zeros(6, 6, dtype=torch.uint8).numpy()}

    def name(self, shard: int, row: int) -> str:
        return f"row {row}"

    def values(self, columns: Any) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("block", [20, 1000])
def test_closing_does_not_wait_for_the_block_that_is_being_read(block: int) -> None:
    stream = ImageStream(SlowShards(), config("anywhere", shuffle_buffer=block))
    batches = StreamBatches(stream, BatchDraws(4, seed=0))
    # The second block is read ahead, or the first one is waited for; the longer one takes 49 seconds.
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(batches.at, 0)
        time.sleep(0.3)
        started = time.monotonic()
        batches.close()
        error = asked.exception()
    assert time.monotonic() - started < 20
    assert error is None or "closed while a batch was waited for" in str(error)


def test_a_closed_stream_goes_on_where_it_was(folder: Path) -> None:
    batches = stream_of(folder)
    found = [batch for count in (1, 2, 4) for batch in taken(batches, count)]
    assert_same(found, taken(stream_of(folder), 7))


def test_no_thread_outlives_a_stream_that_is_closed_or_dropped(folder: Path) -> None:
    before = threading.active_count()
    closed, dropped = stream_of(folder), stream_of(folder)
    closed.at(0), dropped.at(0)
    assert threading.active_count() > before
    closed.close()
    del dropped
    gc.collect()
    assert threading.active_count() == before


def test_flickr_streams_as_it_loads(shared_data: Path) -> None:
    settings = config(
        shared_data / "flickr8k64" / "test.parquet",
        image_size=32,
        caption_column="captions",
        validation_count=20,
        shuffle_buffer=200,
    )
    memory, data = load_images(settings), load_stream(settings)
    (batch,) = taken(StreamBatches(data.train, BatchDraws(480, seed=0)), 1)
    captions: dict[bytes, set[str]] = defaultdict(set)
    counts: list[Counter[bytes]] = [Counter(), Counter()]
    for part in (memory.train, memory.validation):
        for image, several in zip(part.images, part.captions or (), strict=True):
            captions[image.numpy().tobytes()] |= set(several)
            counts[0][image.numpy().tobytes()] += 1
    singly = [(caption,) for caption in batch.captions or ()]
    pairs = ((to_uint8(batch.images), singly), (data.validation.images, data.validation.captions or ()))
    for images, texts in pairs:
        for image, several in zip(images, texts, strict=True):
            assert set(several) <= captions[image.numpy().tobytes()]
            counts[1][image.numpy().tobytes()] += 1
    assert counts[0] == counts[1]
