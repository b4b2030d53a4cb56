"""Prepared data is refused where it is not what the recipe needs, and only there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prepare_cases import (
    contents,
    copy_of,
    open_job,
    save_all,
    save_autoencoder,
    save_bert,
    save_pictures,
    seeds,
    tiny_job,
)

from scalelong.data import DataError
from scalelong.data.prepare import Job, prepare
from scalelong.utils.atomic import read_signed, signed
from scalelong.utils.block_folder import INDEX, BlockError

MakeJob = Callable[[str], Job]


@pytest.mark.parametrize(
    ("block", "change", "message"),
    [
        ("data", {"image_size": 8}, "data.image_size 16, not 8"),
        ("data", {"fit": "pad"}, "data.fit 'crop', not 'pad'"),
        ("data", {"box": [0, 0, 16, 9]}, r"data.box None, not \[0, 0, 16, 9\]"),
        ("data", {"label_column": None}, "data.label_column 'label', not None"),
        ("data", {"validation_count": 7}, "data.validation_count 6, not 7"),
        ("text", {"max_length": 9}, "text.max_length 8, not 9"),
        ("text", {"encoder": "clip"}, "other files of text.encoder"),
        ("text", {"encoder": "owner/elsewhere"}, "text.encoder '.*bert', not 'owner/elsewhere'"),
        ("latents", {"autoencoder": "other"}, "other files of latents.autoencoder"),
    ],
)
def test_data_prepared_for_something_else_is_refused_with_the_key_that_differs(
    block: str, change: dict[str, Any], message: str, tiny_root: Path, made: MakeJob
) -> None:
    save_autoencoder(tiny_root / "other", seed=1)
    job = made("both")
    local = {
        key: str(tiny_root / value) if (tiny_root / str(value)).is_dir() else value for key, value in change.items()
    }
    changed = {block: getattr(job, block).model_copy(update=local)}
    with pytest.raises(DataError, match=f"was prepared for {message}: run `scalelong prepare` again"):
        open_job(job, **changed)
    if "owner/elsewhere" not in change.values():
        with pytest.raises(DataError, match=f"was prepared for {message}: choose another --out, or remove it first"):
            prepare(replace(job, **changed))


@pytest.mark.parametrize("what", ["latents", "text"])
def test_other_contents_of_the_source_are_refused(what: str, tiny_root: Path, tmp_path: Path) -> None:
    pictures = save_pictures(tmp_path / "pictures.parquet")
    job = tiny_job(tiny_root, tmp_path / "out", what=what, source=str(pictures))
    prepare(job)
    open_job(job)
    save_pictures(pictures, seed=1)
    message = "other images or captions in data.source" if what == "latents" else "the captions are not those"
    with pytest.raises(DataError, match=message):
        open_job(job)
    with pytest.raises(DataError, match="other images or captions in data.source"):
        prepare(job)


def test_retrained_weights_under_the_same_name_are_refused(tiny_root: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "bert")
    text = tiny_job(tiny_root, tmp_path).text
    assert text is not None
    text = text.model_copy(update={"encoder": str(tmp_path / "bert")})
    job = replace(tiny_job(tiny_root, tmp_path / "out", what="text"), text=text)
    prepare(job)
    save_bert(tmp_path / "bert", seed=1)
    with pytest.raises(DataError, match="other files of text.encoder"):
        open_job(job)


def test_the_same_data_and_encoders_elsewhere_and_another_scale_are_accepted(
    tiny_root: Path, tmp_path: Path, made: MakeJob
) -> None:
    job = made("both")
    shutil.copytree(tiny_root / "bert", tmp_path / "bert")
    shutil.copy(tiny_root / "pictures.parquet", tmp_path / "moved.parquet")
    assert job.text is not None and job.latents is not None
    text = job.text.model_copy(update={"encoder": str(tmp_path / "bert")})
    data = job.data.model_copy(update={"source": str(tmp_path / "moved.parquet")})
    latents = job.latents.model_copy(update={"scale": 2 * job.latents.scale})
    moved = open_job(job, data=data, text=text, latents=latents).train.pick(torch.arange(4), seeds(4))
    assert torch.equal(moved.images, 2 * open_job(job).train.pick(torch.arange(4), seeds(4)).images)


def test_features_of_the_same_captions_elsewhere_are_accepted(tiny_root: Path, tmp_path: Path, made: MakeJob) -> None:
    job = made("text")
    shutil.copy(tiny_root / "pictures.parquet", tmp_path / "moved.parquet")
    data = job.data.model_copy(update={"source": str(tmp_path / "moved.parquet")})
    assert len(open_job(job, data=data).train) == 18


def test_a_folder_of_another_version_is_refused(tmp_path: Path, made: MakeJob) -> None:
    job = copy_of(made("latents"), tmp_path / "copy")
    content = read_signed(job.folder / INDEX)
    (job.folder / INDEX).write_bytes(signed(content | {"format": 0}))
    with pytest.raises(BlockError, match="was made by another version of scalelong"):
        open_job(job)


def test_latents_need_neither_the_source_nor_the_encoders(tmp_path: Path, tiny_root: Path) -> None:
    here = save_all(tmp_path / "here")
    job = tiny_job(here, tmp_path / "out")
    prepare(job)
    shutil.rmtree(here)
    assert len(open_job(job).train) == 18


def test_a_folder_that_is_not_finished_is_refused(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(tiny_root, tmp_path / "out", what="latents")
    with pytest.raises(DataError, match="there is no prepared data in .*: run `scalelong prepare` first"):
        open_job(job)

    def stop(done: int, total: int) -> None:
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(job, progress=stop)
    with pytest.raises(DataError, match="is not finished: run `scalelong prepare` again, it resumes where it was"):
        open_job(job)


def test_a_folder_with_other_files_is_left_alone(tiny_root: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years of work")
    with pytest.raises(BlockError, match="holds other files"):
        prepare(tiny_job(tiny_root, tmp_path / "work"))
    assert contents(tmp_path / "work") == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flip": True}, "data.flip: latents are computed once"),
        ({"channels": 1}, "data.channels: an autoencoder takes colour, so 3, not 1"),
        ({"image_size": 15}, r"data.image_size: must be a multiple of latents.factor \(2\)"),
        ({"caption_column": None}, "data.caption_column: the recipe has a text encoder, but no column"),
    ],
)
def test_a_recipe_that_cannot_be_prepared_is_refused_before_anything_is_written(
    change: dict[str, Any], message: str, tiny_root: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(tiny_job(tiny_root, tmp_path / "out", **change))
    assert not (tmp_path / "out").exists()
