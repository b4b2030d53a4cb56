"""Laws of sources: each kind of file gives its pixels and labels in order, and what is not there is named."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from image_cases import config, encoded, pictures, pixels_of, saved, stacked, write_parquet, write_tar, write_zip

from scalelong.data import DataError, load_images
from scalelong.data.dataset import open_images
from scalelong.data.prepare import Job, prepare


@pytest.mark.parametrize("layout", ["struct", "binary"])
def test_a_parquet_file_gives_its_pixels_and_labels_in_order(tmp_path: Path, layout: str) -> None:
    items = pictures(7)
    column = encoded(items) if layout == "struct" else [saved(item) for item in items]
    file = write_parquet(tmp_path / "some.parquet", img=column, label=[3, 1, 4, 1, 5, 9, 2])
    data = load_images(config(file, image_column="img", label_column="label"))
    assert data.train.labels is not None and data.validation.labels is not None
    # Rows 0 and 3 of 7 are for validation: two at even distances.
    assert torch.equal(data.validation.images, torch.stack([pixels_of(items[row]) for row in (0, 3)]))
    assert torch.equal(data.train.images, torch.stack([pixels_of(items[row]) for row in (1, 2, 4, 5, 6)]))
    assert (data.train.labels.tolist(), data.validation.labels.tolist()) == ([1, 4, 5, 9, 2], [3, 1])


def test_a_folder_of_parquet_files_has_the_splits_of_their_names(tmp_path: Path) -> None:
    train, test = pictures(5), pictures(4)
    folder = tmp_path / "set"
    folder.mkdir()
    write_parquet(folder / "train.parquet", image=encoded(train))
    write_parquet(folder / "test.parquet", image=encoded(test))
    data = load_images(config(folder, validation_split="test", validation_count=2))
    assert torch.equal(data.train.images, stacked(train))
    assert torch.equal(data.validation.images, torch.stack([pixels_of(test[0]), pixels_of(test[2])]))
    assert data.train.labels is None
    assert len(load_images(config(folder, validation_split="test", validation_count=100)).validation) == 4


README = """---
configs:
- {config_name: small, data_files: small.parquet}
- {config_name: large, data_files: large.parquet}
---
"""


@pytest.fixture
def two_configs(tmp_path: Path) -> tuple[Path, dict[str, list[Any]]]:
    folder, items = tmp_path / "set", {"small": pictures(4), "large": pictures(6)}
    folder.mkdir()
    (folder / "README.md").write_text(README)
    for name, some in items.items():
        write_parquet(folder / f"{name}.parquet", image=encoded(some))
    return folder, items


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_configuration_of_a_set_is_chosen_by_its_name(two_configs: Any, name: str) -> None:
    folder, items = two_configs
    data = load_images(config(folder, config=name, validation_count=1))
    assert torch.equal(torch.cat([data.validation.images, data.train.images]), stacked(items[name]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "data.config: '{folder}' has 2 configurations: choose one of small, large"),
        ("smal", "data.config: '{folder}' has no configuration 'smal'; did you mean 'small'? There are: small, large"),
    ],
)
def test_a_configuration_that_is_missing_or_unknown_is_an_error_that_lists_them(
    two_configs: Any, name: str | None, message: str
) -> None:
    folder, _ = two_configs
    with pytest.raises(DataError) as caught:
        load_images(config(folder, config=name))
    assert str(caught.value) == message.format(folder=folder)


def test_a_file_has_no_configurations(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "some.parquet", image=encoded(pictures(3)))
    for source in (file, tmp_path / "*.parquet", "sklearn:digits"):
        with pytest.raises(DataError, match="data.config: .* has no configurations to choose from; leave it out"):
            load_images(config(source, config="small"))


def test_an_image_folder_gives_the_names_of_its_subfolders_as_labels(tmp_path: Path) -> None:
    folder, items = tmp_path / "animals", pictures(4)
    for name, item in zip(["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"], items, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        item.save(folder / name)
    data = load_images(config(folder, label_column="label"))
    assert data.train.labels is not None and data.validation.labels is not None
    # The validation images are spread over the table, so that both classes are among them.
    assert (data.train.labels.tolist(), data.validation.labels.tolist()) == ([0, 1], [0, 1])
    assert torch.equal(data.validation.images, torch.stack([pixels_of(items[0]), pixels_of(items[2])]))


@pytest.mark.parametrize("place", ["{split}/{animal}/{row}.png", "{animal}/{split}-{row}.png"])
def test_the_names_in_an_image_folder_tell_the_splits_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    items = iter(pictures(8))
    for split in ("train", "test"):
        for animal in ("cat", "dog"):
            for row in range(2):
                file = tmp_path / "animals" / place.format(split=split, animal=animal, row=row)
                file.parent.mkdir(parents=True, exist_ok=True)
                next(items).save(file)
    # The library would walk the folder once for each of its patterns.
    monkeypatch.setitem(sys.modules, "datasets", None)
    data = load_images(config(tmp_path / "animals", validation_split="test", label_column="label"))
    assert data.train.labels is not None and data.train.labels.tolist() == [0, 0, 1, 1]
    assert data.validation.labels is not None and data.validation.labels.tolist() == [0, 1]


def test_an_image_folder_with_metadata_is_read_by_the_library(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    lines = "".join(f'{{"file_name": "{row}.png", "text": "number {row}"}}\n' for row in range(3))
    (tmp_path / "set" / "metadata.jsonl").write_text(lines)
    for row, item in enumerate(pictures(3)):
        item.save(tmp_path / "set" / f"{row}.png")
    data = load_images(config(tmp_path / "set", caption_column="text", validation_count=1))
    assert data.train.captions == (("number 1",), ("number 2",))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nowhere", "data.source: './nowhere' was not found (looked for {cwd}/nowhere)"),
        ("nowhere.parquet", "data.source: 'nowhere.parquet' was not found (looked for {cwd}/nowhere.parquet)"),
        ("a/b/c", "data.source: 'a/b/c' was not found (looked for {cwd}/a/b/c)"),
        (
            "sklearn:iris",
            "data.source: 'sklearn:iris' is not known; of scikit-learn's datasets only 'sklearn:digits' is",
        ),
    ],
)
def test_a_source_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_images(config(source))
    assert str(caught.value) == message.format(cwd=tmp_path)


@pytest.mark.parametrize(
    "source", ["./gone", "~/gone", "/gone", "gone.parquet", "gone/set.ZIP", "gone.tar.gz", "a/b/c"]
)
@pytest.mark.parametrize("how", ["memory", "cache", "prepare"])
def test_a_path_that_is_missing_is_never_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, how: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    settings = config(source, memory_gb=0 if how == "cache" else None)
    with pytest.raises(DataError, match=rf"data.source: '{re.escape(source)}' was not found \(looked for /"):
        prepare(Job(settings, None, None, tmp_path / "out")) if how == "prepare" else open_images(settings)


@pytest.mark.parametrize("split", ["train", "test"])
def test_tars_give_the_fields_of_a_webdataset_as_columns(tmp_path: Path, split: str) -> None:
    items = pictures(6)
    for shard in range(2):
        members = {}
        for row in range(3 * shard, 3 * shard + 3):
            members |= {f"{row}.png": saved(items[row]), f"{row}.cls": b"%d" % row, f"{row}.txt": b"number %d" % row}
        write_tar(tmp_path / "set" / f"{split}-{shard}.tar", members)
    wanted = {"image_column": "png", "label_column": "cls", "caption_column": "txt"}
    data = load_images(config(tmp_path / "set", train_split=split, **wanted)).train
    assert data.labels is not None and data.labels.tolist() == [1, 2, 4, 5]
    assert data.captions == tuple((f"number {row}",) for row in (1, 2, 4, 5))
    assert torch.equal(data.images, stacked([items[row] for row in (1, 2, 4, 5)]))
    one = load_images(config(tmp_path / "set" / f"{split}-0.tar", validation_count=1, **wanted)).train
    assert one.labels is not None and one.labels.tolist() == [1, 2]
    pattern = load_images(config(tmp_path / "set" / f"{split}-*.tar", **wanted)).train
    assert torch.equal(pattern.images, data.images)


def test_a_zip_gives_its_images_and_the_names_of_its_folders_as_labels(tmp_path: Path) -> None:
    items = pictures(4)
    names = ["set/cat/0.png", "set/cat/1.png", "set/dog/0.png", "set/dog/1.png"]
    others = {"set/readme.txt": b"no image", "__MACOSX/set/cat/._0.png": b"no image", "set/dog/": b""}
    members = dict(zip(reversed(names), map(saved, reversed(items)), strict=True)) | others
    data = load_images(config(write_zip(tmp_path / "some.zip", members), label_column="label"))
    assert data.train.labels is not None and data.validation.labels is not None
    assert (data.train.labels.tolist(), data.validation.labels.tolist()) == ([0, 1], [0, 1])
    assert torch.equal(data.validation.images, stacked([items[0], items[2]]))
    assert torch.equal(data.train.images, stacked([items[1], items[3]]))


@pytest.mark.parametrize("names", [["0", "1", "2", "3"], ["a/0", "a/1", "a/2", "a/3"], ["a/0", "b/1", "b/c/2", "3"]])
def test_a_zip_without_a_folder_for_each_class_has_no_labels(tmp_path: Path, names: list[str]) -> None:
    items = map(saved, pictures(4))
    file = write_zip(tmp_path / "some.zip", {f"{name}.png": item for name, item in zip(names, items, strict=True)})
    assert load_images(config(file)).train.labels is None
    with pytest.raises(DataError, match=r"data.label_column: there is no column 'label'. There are: image"):
        load_images(config(file, label_column="label"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"this is no zip", "data.source: '{file}' is not a zip that can be read: File is not a zip file"),
        (None, "data.source: there are no images in '{file}'"),
    ],
)
def test_a_zip_without_images_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "some.zip"
    write_zip(file, {"a.txt": b"hello"}) if content is None else file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_images(config(file))
    assert str(caught.value) == message.format(file=file)


def test_a_path_that_is_misspelt_is_answered_with_the_closest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    with pytest.raises(DataError) as caught:
        load_images(config("./data/cifr10"))
    looked = f"looked for {tmp_path}/data/cifr10; did you mean 'data/cifar10'?"
    assert str(caught.value) == f"data.source: './data/cifr10' was not found ({looked})"


def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.source: there are no files '.*/x-\*\.tar'"):
        load_images(config(tmp_path / "x-*.tar"))


@pytest.mark.parametrize("kind", ["text file", "empty folder"])
def test_a_path_without_images_says_what_it_could_be(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    path.write_text("hello") if kind == "text file" else path.mkdir()
    with pytest.raises(
        DataError, match="is neither a parquet file, a tar or a zip nor a folder of parquet files, tars or images"
    ):
        load_images(config(path))


def test_without_the_hub_a_local_path_is_proposed() -> None:
    with pytest.raises(DataError, match="hub could not be reached .* --set data.source=PATH"):
        load_images(config("nobody-here/no-such-set"))


@pytest.mark.parametrize(
    ("source", "library", "blocked"),
    [("sklearn:digits", "scikit-learn", "sklearn.datasets"), ("nobody-here/no-such-set", "datasets", "datasets")],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, source: str, library: str, blocked: str
) -> None:
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(ImportError) as caught:
        load_images(config(source))
    assert str(caught.value) == f"the data '{source}' needs {library}: pip install 'scalelong[train]'"
