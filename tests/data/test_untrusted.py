"""Data and networks of strangers: nothing of them runs, no file of this machine is read, and no memory is filled."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from image_cases import config, encoded, pictures, saved, stacked, write_parquet, write_tar, write_zip
from prepare_cases import save_bert

from scalelong.data import DataError, folders, load_images
from scalelong.data.config import TextConfig
from scalelong.data.encoders import TextEncoder, locate
from scalelong.data.sources import open_tables
from scalelong.evaluation.networks import load_features


class Runs:
    """What a pickle can do."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


CODE = """
import pathlib
pathlib.Path({mark!r}).mkdir()
from transformers import PretrainedConfig
class Config(PretrainedConfig):
    model_type = {kind!r}
"""


def with_code(folder: Path, mark: Path, kind: str) -> Path:
    """A network that comes with Python code of its own for its config, tokenizer and model."""
    (folder / "own.py").write_text(CODE.format(mark=str(mark), kind=kind))
    content = json.loads((folder / "config.json").read_text())
    content |= {"model_type": kind, "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("answer", ["y\n", "n\n", ""])
def test_code_that_comes_with_a_network_is_never_run_whatever_stdin_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    folder, mark = with_code(save_bert(tmp_path / "net"), tmp_path / "mark", "never-seen"), tmp_path / "mark"
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with pytest.raises(DataError, match="Python code of its own, which is never run"):
        TextEncoder(TextConfig(encoder=str(folder), max_length=8))
    (folder / "preprocessor_config.json").write_text('{"size": 8}')
    with pytest.raises(ValueError, match="Python code of its own, which is never run"):
        load_features(str(folder))
    assert not mark.exists()


def test_weights_that_are_pickles_only_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "net")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(tmp_path / "mark")))
    with pytest.raises(DataError, match=r"pytorch_model\.bin is not read, as pickles may run code: save the network"):
        locate(str(folder), "text.encoder")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", struct.pack("<Q", 1 << 60) + b"{}"])
def test_a_network_whose_safetensors_are_none_ends_in_a_line(tmp_path: Path, content: bytes) -> None:
    folder = save_bert(tmp_path / "net")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(content)
    with pytest.raises(DataError, match="cannot be loaded as BertModel|cannot be loaded as AutoModel"):
        TextEncoder(TextConfig(encoder=str(folder), max_length=8))


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"size": "large"}', '{"size": 1e99}', "{}", '{"size": 8, "image_mean": 3}']
)
def test_a_preprocessor_that_says_no_size_is_named(tmp_path: Path, content: str) -> None:
    folder = save_bert(tmp_path / "net")
    (folder / "preprocessor_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"preprocessor_config\.json does not say how large images must be"):
        load_features(str(folder))


# Rows that name files


@pytest.mark.parametrize("form", ["text", "struct", "address"])
def test_a_row_that_names_a_file_is_refused_unless_a_key_allows_it(tmp_path: Path, form: str) -> None:
    items = pictures(6)
    files = [tmp_path / f"{number}.png" for number in range(6)]
    for file, item in zip(files, items, strict=True):
        item.save(file)
    names: list[Any] = list(map(str, files))
    if form == "address":
        names = [f"https://example.invalid/{file.name}" for file in files]
    rows = [{"bytes": None, "path": name} for name in names] if form == "struct" else names
    table = write_parquet(tmp_path / "rows" / "train.parquet", image=rows)
    for source in (table, table.parent):
        with pytest.raises(
            DataError, match=r"a row names the file '.*\.png' .*If you trust it: data\.allow_paths: true"
        ):
            load_images(config(source))
    if form != "address":
        found = load_images(config(table, allow_paths=True))
        assert len(found.train.images) + len(found.validation.images) == 6


def test_a_row_with_bytes_may_say_what_its_file_was_called(tmp_path: Path) -> None:
    rows = [{**row, "path": "/etc/passwd"} for row in encoded(pictures(6))]
    assert len(load_images(config(write_parquet(tmp_path / "train.parquet", image=rows))).train.images) == 4


@pytest.mark.parametrize("name", ["text", "pandas", "parquet", "imagefolder", "csv"])
def test_a_folder_that_is_called_like_a_format_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    items = pictures(6)
    write_parquet(tmp_path / name / "train.parquet", image=encoded(items))
    monkeypatch.chdir(tmp_path)
    found = load_images(config(name, validation_count=1))
    assert torch.equal(found.train.images, stacked(items)[1:])


def test_the_name_of_a_format_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "train.parquet", image=encoded(pictures(6)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="'parquet' is a format"):
        load_images(config("parquet"))


def test_the_script_of_a_folder_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_parquet(folder / "train.parquet", image=encoded(pictures(6)))
    (folder / "set.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    try:
        load_images(config(folder))
    except DataError as error:
        assert "\n" not in str(error)
    assert not (tmp_path / "mark").exists()


def test_a_tar_with_a_pickle_ends_in_a_line_and_runs_nothing(tmp_path: Path) -> None:
    members = {
        f"{number}.{kind}": content
        for number in range(3)
        for kind, content in (("png", saved(pictures(1)[0])), ("pth", pickle.dumps(Runs(tmp_path / "mark"))))
    }
    with pytest.raises(DataError, match="is neither a parquet file, a tar or a zip"):
        load_images(config(write_tar(tmp_path / "set.tar", members), image_column="png"))
    assert not (tmp_path / "mark").exists()


# Bombs


def bomb(width: int, height: int) -> bytes:
    """A PNG of so many pixels, all black, in some kB."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packer = zlib.compressobj(1)
    row = bytes(1 + width // 8)
    rows = b"".join(packer.compress(row) for _ in range(min(height, 64))) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [9_500, 12_000, 60_000])
def test_a_picture_of_too_many_pixels_is_broken_and_never_unpacked(tmp_path: Path, side: int) -> None:
    members = {f"{number}.png": saved(item) for number, item in enumerate(pictures(4))}
    source = write_zip(tmp_path / "set.zip", {**members, "9.png": bomb(side, side)})
    with pytest.raises(DataError, match=r"1 of 5 images .* could not be read \(row 4 \(9\.png\): .*(pixels|bomb)"):
        load_images(config(source))


def test_a_member_of_a_zip_that_unpacks_to_more_than_any_picture_is_broken(tmp_path: Path) -> None:
    members = {f"{number}.png": saved(item) for number, item in enumerate(pictures(4))}
    path = write_zip(tmp_path / "set.zip", members)
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("9.png", "w") as file,
    ):
        for _ in range(257):
            file.write(bytes(1 << 20))
    with pytest.raises(
        DataError, match=r"row 4 \(9\.png\): ValueError: it has 269\.5 MB unpacked, more than any picture"
    ):
        load_images(config(path))


def test_a_tar_with_a_huge_member_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "set.tar", {f"{number}.png": saved(item) for number, item in enumerate(pictures(4))})
    with tarfile.open(path, "a") as archive:
        huge = tarfile.TarInfo("9.png")
        huge.size = 1 << 40
        archive.addfile(huge)
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 4096)
    with pytest.raises(DataError, match=r"9\.png has 1\.1 TB unpacked or more: that is no data set"):
        load_images(config(path, image_column="png"))


def test_a_packed_tar_that_unpacks_to_far_more_than_it_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "LARGEST_MEMBER", 1 << 20)
    path = tmp_path / "set.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for number in range(40):
            member = tarfile.TarInfo(f"{number}.png")
            member.size = 1 << 19
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(DataError, match="its files have .* unpacked or more: that is no data set"):
        load_images(config(path, image_column="png"))


def test_a_damaged_packed_tar_ends_in_a_line(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "set.tar", {"0.png": saved(pictures(1)[0])})
    shutil.copy(path, path.with_suffix(".gz"))
    with pytest.raises(DataError):
        load_images(config(path.with_suffix(".gz"), image_column="png"))
    assert open_tables(str(path)).keys() == {"train"}
