"""`prepare`: the same bytes whatever was killed and however many worked on it, and what these bytes are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from prepare_cases import contents, copy_of, damage, in_processes, open_job, save_all, save_pictures, seeds, tiny_job
from safetensors.torch import load_file, save_file

from scalelong.data import DataError, load_images
from scalelong.data import prepared as prepared_module
from scalelong.data.encoders import LatentEncoder, TextEncoder
from scalelong.data.prepare import Job, PreparedFolder, prepare
from scalelong.data.prepared import mapped
from scalelong.utils.block_folder import INDEX
from scalelong.utils.runtime import Rank, keyed_generator

MakeJob = Callable[[str], Job]


# What the files hold.


def test_latents_are_those_of_the_images_with_the_noise_of_the_seed_of_the_example(made: MakeJob) -> None:
    job = made("latents")
    assert job.latents is not None
    images = load_images(job.data)
    picked = open_job(job).validation.pick(torch.arange(6), seeds(6))
    mean, std = LatentEncoder(job.latents).encode(images.validation.images).chunk(2, dim=1)
    noise = torch.stack([torch.randn(2, 8, 8, generator=keyed_generator(seed, "latent", 0)) for seed in range(6)])
    # 1e-6: the shards were encoded five and one together.
    torch.testing.assert_close(picked.images, (mean + std * noise) * job.latents.scale, rtol=0, atol=1e-6)
    assert images.validation.labels is not None and picked.labels is not None
    assert torch.equal(picked.labels, images.validation.labels)
    assert picked.text is None


def test_an_example_is_a_function_of_its_index_and_seed(made: MakeJob) -> None:
    train = open_job(made("both")).train
    together, again = (train.pick(torch.arange(18), seeds(18)) for _ in range(2))
    alone = train.pick(torch.tensor([11]), seeds(1, first=11))
    other = train.pick(torch.arange(18), seeds(18, first=100))
    assert together.text is not None and alone.text is not None
    assert torch.equal(together.images, again.images)
    assert torch.equal(together.images[11], alone.images[0]) and torch.equal(together.text[11], alone.text[0])
    assert not torch.equal(together.images, other.images)


@pytest.mark.parametrize("what", ["text", "both"])
def test_the_text_of_an_example_is_the_feature_of_the_caption_that_its_seed_chooses(what: str, made: MakeJob) -> None:
    job = made(what)
    assert job.text is not None
    indices, chosen = torch.arange(18), seeds(18, first=40)
    captions = load_images(job.data).train.pick(indices, chosen).captions
    text = open_job(job).train.pick(indices, chosen).text
    assert captions is not None and text is not None and text.dtype == torch.float32
    # 2e-3: kept in 16 bits, of numbers up to 4.
    torch.testing.assert_close(text, TextEncoder(job.text).encode(captions), rtol=0, atol=2e-3)


def test_every_caption_of_an_image_is_chosen(made: MakeJob) -> None:
    job = made("text")
    train, captions = open_job(job).train, load_images(job.data).train.captions
    assert captions is not None and max(map(len, captions)) == 3
    for index, several in enumerate(captions):
        text = train.pick(torch.full((30,), index), seeds(30)).text
        assert text is not None
        assert len(torch.unique(text, dim=0)) == len(set(several))


def test_without_latents_the_images_are_those_in_memory(made: MakeJob) -> None:
    job = made("text")
    assert not any("moments" in load_file(file) for file in job.folder.glob("*.safetensors"))
    indices = torch.tensor([3, 0, 3])
    picked, plain = open_job(job).train.pick(indices, seeds(3)), load_images(job.data).train.pick(indices, seeds(3))
    assert torch.equal(picked.images, plain.images) and picked.images.dtype == torch.uint8
    assert picked.captions == plain.captions and plain.labels is not None and picked.labels is not None
    assert torch.equal(picked.labels, plain.labels)


def test_the_empty_caption_has_its_feature(made: MakeJob) -> None:
    job = made("text")
    assert job.text is not None
    empty = open_job(job).empty_text
    assert empty is not None and empty.shape == (8, 16)
    assert torch.equal(empty, TextEncoder(job.text).encode([""])[0].half().float())
    assert open_job(made("latents")).empty_text is None


def test_rows_come_in_shards_of_a_fixed_number_in_the_order_of_the_table(made: MakeJob) -> None:
    job = made("both")
    counts = {file.stem: len(load_file(file)["labels"]) for file in sorted(job.folder.glob("*-*.safetensors"))}
    assert counts == {
        "validation-00000": 5,
        "validation-00001": 1,
        **{f"train-{number:05d}": count for number, count in enumerate([5, 5, 5, 3])},
    }
    labels = [load_file(job.folder / f"train-{number:05d}.safetensors")["labels"] for number in range(4)]
    assert load_images(job.data).train.labels is not None
    assert torch.equal(torch.cat(labels), load_images(job.data).train.labels)
    assert len(open_job(job).train) == 18 and len(open_job(job).validation) == 6


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the memory of a process")
def test_opening_a_shard_takes_no_memory_for_it(tmp_path: Path) -> None:
    save_file({"moments": torch.ones(64, 1 << 18)}, tmp_path / "large.safetensors")

    def memory() -> int:
        status = Path("/proc/self/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) << 10

    before = memory()
    tensors = mapped(tmp_path / "large.safetensors")
    assert tensors["moments"][::8].sum() == 8 << 18
    assert memory() - before < 16 << 20


# Kills, processes and damage.


def test_a_job_killed_at_random_and_one_of_two_processes_leave_the_same_bytes(
    tiny_root: Path, tmp_path: Path, made: MakeJob
) -> None:
    plan = {"root": tiny_root, "block_rows": 2}
    hits = in_processes(
        {**plan, "out": tmp_path / "whole"},
        {**plan, "out": tmp_path / "killed", "kills": 2, "seed": 3},
        {**plan, "out": tmp_path / "two", "processes": 2},
        {**plan, "out": tmp_path / "two-killed", "processes": 2, "kills": 1},
    )
    assert hits[:2] == [1, 1] and hits[2] > 0
    whole = contents(tmp_path / "whole")
    assert len(whole) == 9 + 3 + 2
    for name in ("killed", "two", "two-killed"):
        assert contents(tmp_path / name) == whole


def test_a_process_that_comes_late_does_nothing_again(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, begin, finished = tiny_job(tiny_root, tmp_path / "out"), PreparedFolder.begin, {}

    def begin_late(self: PreparedFolder, *arguments: Any, **options: Any) -> Any:
        index = begin(self, *arguments, **options)
        if self.rank.index:
            # The first process does everything between the beginning of the second and its first block.
            assert prepare(job) is not None
            finished.update(contents(job.folder))
            monkeypatch.setattr(PreparedFolder, "make", lambda *_: pytest.fail("a finished block was made again"))
        return index

    monkeypatch.setattr(PreparedFolder, "begin", begin_late)
    assert prepare(job, Rank(1, 2)) is None
    assert finished and contents(job.folder) == finished


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_job_killed_ten_times_leaves_the_same_bytes(seed: int, tmp_path: Path) -> None:
    plan = {"root": save_all(tmp_path, rows=54), "block_rows": 1}
    hits = in_processes({**plan, "out": tmp_path / "whole"}, {**plan, "out": tmp_path / "k", "kills": 10, "seed": seed})
    assert hits == [1] * 10
    assert contents(tmp_path / "k") == contents(tmp_path / "whole")


@pytest.mark.parametrize("harm", [damage, lambda file: file.write_bytes(file.read_bytes()[:-1]), Path.unlink])
def test_a_damaged_shard_is_made_anew_and_no_other_is_touched(
    harm: Callable[[Path], None], tmp_path: Path, made: MakeJob
) -> None:
    job = copy_of(made("both"), tmp_path / "copy")
    others = [file for file in job.folder.glob("*.safetensors") if file.name != "train-00001.safetensors"]
    before = {file: file.stat().st_mtime_ns for file in others}
    harm(job.folder / "train-00001.safetensors")
    with pytest.raises(DataError, match=r"is damaged, train-00001.safetensors .*: run `scalelong prepare` again"):
        open_job(job)
    prepare(job)
    assert contents(job.folder) == contents(made("both").folder)
    assert {file: file.stat().st_mtime_ns for file in others} == before


def test_with_a_damaged_index_everything_is_made_anew(tmp_path: Path, made: MakeJob) -> None:
    job = copy_of(made("latents"), tmp_path / "copy")
    damage(job.folder / INDEX)
    with pytest.raises(DataError, match="there is no prepared data in"):
        open_job(job)
    prepare(job)
    assert contents(job.folder) == contents(made("latents").folder)


def test_what_a_killed_writer_left_behind_is_removed(tmp_path: Path, made: MakeJob) -> None:
    job = copy_of(made("latents"), tmp_path / "copy")
    (job.folder / ".tmp-1-train-00000.safetensors").write_bytes(b"half")
    prepare(job)
    assert contents(job.folder) == contents(made("latents").folder)


def test_what_another_process_is_writing_just_now_is_left_alone(tmp_path: Path, made: MakeJob) -> None:
    job = copy_of(made("latents"), tmp_path / "copy")
    writing = job.folder / ".tmp-1-train-00000.safetensors"
    prepare(job, progress=lambda done, total: writing.touch())
    assert writing.exists()


def test_large_sets_are_compared_by_size_when_they_are_opened(
    tmp_path: Path, made: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_module, "HASHED_BYTES", 0)
    job = copy_of(made("latents"), tmp_path / "copy")
    damage(job.folder / "train-00000.safetensors")
    open_job(job)
    (job.folder / "train-00001.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match="train-00001.safetensors has 5 bytes instead of"):
        open_job(job)


# Broken images.


@pytest.mark.parametrize("what", ["both", "text"])
def test_an_image_that_cannot_be_read_is_left_out_with_its_captions_and_named(
    what: str, tiny_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = save_pictures(tmp_path / "pictures.parquet", 101, broken=[40])
    job = tiny_job(tiny_root, tmp_path / "out", what=what, block_rows=16, source=str(source))
    result = prepare(job)
    prepared = open_job(job)
    assert result is not None and len(prepared.train) == 94
    images = load_images(job.data).train
    picked = prepared.train.pick(torch.arange(94), seeds(94))
    assert job.text is not None and images.labels is not None and picked.labels is not None
    assert torch.equal(picked.labels, images.labels)
    captions = images.pick(torch.arange(94), seeds(94)).captions
    assert captions is not None and picked.text is not None
    # 2e-3: kept in 16 bits, of numbers up to 4.
    torch.testing.assert_close(picked.text, TextEncoder(job.text).encode(captions), rtol=0, atol=2e-3)
    if what == "both":
        assert result.rows == {"train": 94, "validation": 6}
        assert result.broken.found == [("row 40", "UnidentifiedImageError: cannot identify image file")]
        named = [entry["broken"] for entry in json.loads((job.folder / INDEX).read_text())["entries"].values()]
        assert list(chain.from_iterable(named)) == ["row 40"]


def test_more_than_a_hundredth_of_broken_images_stops_the_job_also_when_it_goes_on(
    tiny_root: Path, tmp_path: Path
) -> None:
    source = save_pictures(tmp_path / "pictures.parquet", 101, broken=[40, 70])
    job = tiny_job(tiny_root, tmp_path / "out", what="latents", block_rows=16, source=str(source))
    for _ in range(2):
        with pytest.raises(DataError, match=r"2 of 101 images of .* \(row 40: .*, row 70: .*\); more than 1 %"):
            prepare(job)
