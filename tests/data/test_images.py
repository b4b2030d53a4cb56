"""Laws of loading: pixels arrive unchanged where nothing need change, and an error says what to set."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from scalelong.data import DataConfig, DataError, load_images


@pytest.fixture(autouse=True)
def cache_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps a copy of what it loads; tests must not leave one behind."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def config(source: Any, **options: Any) -> DataConfig:
    return DataConfig(**{"source": str(source), "image_size": 6, "heldout_count": 2, **options})


def pictures(count: int, *, size: int = 6) -> list[Image.Image]:
    return [picture_of(torch.randint(0, 256, (3, size, size), dtype=torch.uint8)) for _ in range(count)]


def picture_of(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def pixels_of(picture: Image.Image) -> Tensor:
    raw = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return raw.view(picture.height, picture.width, -1).permute(2, 0, 1)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(file: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


def encoded(items: list[Image.Image]) -> list[dict[str, Any]]:
    """As the hub stores images: the file's bytes and its name."""
    return [{"bytes": png(item), "path": None} for item in items]


def load_one(folder: Path, name: str, picture: Image.Image, **options: Any) -> Tensor:
    """What a picture saved under that name becomes. Shape: (C, H, W)."""
    images = folder / "images"
    images.mkdir()
    # A second, plain picture, because one of the two is held out: the first.
    picture.save(images / f"0{name}")
    Image.new("L", picture.size).save(images / "1.png")
    return load_images(config(images, heldout_count=1, **options)).heldout.images[0]


def test_digits_are_scikit_learns_with_grey_levels_0_to_16_stretched_to_0_to_255() -> None:
    data = load_images(config("sklearn:digits", image_size=8, channels=1, label_column="label", heldout_count=97))
    original = load_digits()
    everything = torch.cat([data.train.images, data.heldout.images]).flatten(1)
    assert everything.shape == (1797, 64) and everything.dtype == torch.uint8
    stretched = [[round(level * 255 / 16) for level in image] for image in original.data.tolist()]
    assert sorted(everything.tolist()) == sorted(stretched)
    assert data.train.labels is not None and data.heldout.labels is not None
    assert torch.cat([data.train.labels, data.heldout.labels]).bincount().tolist() == [
        (original.target == digit).sum() for digit in range(10)
    ]


@pytest.mark.parametrize("layout", ["struct", "binary"])
def test_a_parquet_file_gives_its_pixels_and_labels_in_order(tmp_path: Path, layout: str) -> None:
    items = pictures(7)
    column = encoded(items) if layout == "struct" else [png(item) for item in items]
    file = write_parquet(tmp_path / "some.parquet", img=column, label=[3, 1, 4, 1, 5, 9, 2])
    data = load_images(config(file, image_column="img", label_column="label"))
    assert data.train.labels is not None and data.heldout.labels is not None
    # Rows 0 and 3 of 7 are held out: two at even distances.
    assert torch.equal(data.heldout.images, torch.stack([pixels_of(items[row]) for row in (0, 3)]))
    assert torch.equal(data.train.images, torch.stack([pixels_of(items[row]) for row in (1, 2, 4, 5, 6)]))
    assert (data.train.labels.tolist(), data.heldout.labels.tolist()) == ([1, 4, 5, 9, 2], [3, 1])


def test_a_folder_of_parquet_files_has_the_splits_of_their_names(tmp_path: Path) -> None:
    train, test = pictures(5), pictures(4)
    folder = tmp_path / "set"
    folder.mkdir()
    write_parquet(folder / "train.parquet", image=encoded(train))
    write_parquet(folder / "test.parquet", image=encoded(test))
    data = load_images(config(folder, heldout_split="test", heldout_count=2))
    assert torch.equal(data.train.images, torch.stack(list(map(pixels_of, train))))
    assert torch.equal(data.heldout.images, torch.stack([pixels_of(test[0]), pixels_of(test[2])]))
    assert data.train.labels is None
    assert len(load_images(config(folder, heldout_split="test", heldout_count=100)).heldout) == 4


def test_an_image_folder_gives_the_names_of_its_subfolders_as_labels(tmp_path: Path) -> None:
    folder, items = tmp_path / "animals", pictures(4)
    for name, item in zip(["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"], items, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        item.save(folder / name)
    data = load_images(config(folder, label_column="label"))
    assert data.train.labels is not None and data.heldout.labels is not None
    # The held-out images are spread over the table, so that both classes are among them.
    assert (data.train.labels.tolist(), data.heldout.labels.tolist()) == ([0, 1], [0, 1])
    assert torch.equal(data.heldout.images, torch.stack([pixels_of(items[0]), pixels_of(items[2])]))


@pytest.mark.parametrize(("width", "height"), [(18, 6), (6, 18)])
def test_cropping_keeps_the_centre_of_the_longer_side(tmp_path: Path, width: int, height: int) -> None:
    whole = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    top, left = (height - 6) // 2, (width - 6) // 2
    loaded = load_one(tmp_path, ".png", picture_of(whole))
    assert torch.equal(loaded, whole[:, top : top + 6, left : left + 6])


def test_shrinking_averages_what_is_finer_than_a_pixel(tmp_path: Path) -> None:
    rows, columns = torch.meshgrid(torch.arange(48), torch.arange(48), indexing="ij")
    checkerboard = ((rows + columns) % 2 * 255).to(torch.uint8).expand(3, 48, 48)
    loaded = load_one(tmp_path, ".png", picture_of(checkerboard))
    # Without antialiasing every pixel would be black or white. At the border the filter sees half a period more.
    assert (loaded.int() - 127).abs().max() <= 3


def test_padding_puts_the_picture_unchanged_into_the_middle_of_black(tmp_path: Path) -> None:
    whole = torch.randint(1, 256, (3, 4, 2), dtype=torch.uint8)
    loaded = load_one(tmp_path, ".png", picture_of(whole), fit="pad")
    framed = torch.zeros(3, 6, 6, dtype=torch.uint8)
    framed[:, 1:5, 2:4] = whole
    assert torch.equal(loaded, framed)


def test_padding_refuses_a_picture_that_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="7×7 is larger than the 6×6 to pad it to; use data.fit: crop"):
        load_one(tmp_path, ".png", pictures(1, size=7)[0], fit="pad")


def test_grey_pictures_become_three_equal_channels_and_colours_one(tmp_path: Path) -> None:
    grey = Image.new("L", (6, 6), 77)
    file = write_parquet(tmp_path / "grey.parquet", image=encoded([grey, Image.new("RGB", (6, 6), (255, 0, 0))]))
    in_colour = load_images(config(file, heldout_count=1))
    assert (in_colour.heldout.images == 77).all() and in_colour.heldout.images.shape == (1, 3, 6, 6)
    in_grey = load_images(config(file, heldout_count=1, channels=1))
    assert in_grey.train.images.shape == (1, 1, 6, 6)
    # Red's share of the luminance in ITU-R 601.
    assert (in_grey.train.images == round(0.299 * 255)).all()


def test_transparent_parts_are_white(tmp_path: Path) -> None:
    picture = Image.new("RGBA", (6, 6), (255, 0, 0, 0))
    picture.putpixel((2, 1), (10, 20, 30, 255))
    loaded = load_one(tmp_path, ".png", picture)
    assert loaded[:, 1, 2].tolist() == [10, 20, 30]
    assert loaded[:, 0, 0].tolist() == [255, 255, 255]


def test_a_palette_is_looked_up(tmp_path: Path) -> None:
    original = Image.new("RGB", (6, 6), (10, 200, 30))
    loaded = load_one(tmp_path, ".png", original.quantize(4))
    assert torch.equal(loaded, pixels_of(original))


def test_sixteen_bits_keep_their_upper_half(tmp_path: Path) -> None:
    picture = Image.new("I;16", (6, 6), 0x8123)
    assert (load_one(tmp_path, ".png", picture, channels=1) == 0x81).all()


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    loaded = load_one(tmp_path, ".tif", Image.new("CMYK", (6, 6), (255, 0, 0, 0)))
    assert loaded[:, 0, 0].tolist() == [0, 255, 255]


def test_a_picture_is_turned_upright_as_its_exif_says(tmp_path: Path) -> None:
    upright = torch.randint(0, 256, (3, 6, 6), dtype=torch.uint8)
    lying = picture_of(upright).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned clockwise by 90° to be seen upright
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("0.png", "1.png"):
        lying.save(folder / name, exif=exif)
    data = load_images(config(folder, heldout_count=1))
    assert torch.equal(data.train.images[0], upright)


def test_progress_counts_every_image_once(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "few.parquet", image=encoded(pictures(5)))
    calls: list[tuple[int, int]] = []
    load_images(config(file), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 5) for done in range(1, 6)]


def test_loading_prints_nothing_and_leaves_the_librarys_progress_bars_as_they_were(tmp_path: Path, capfd) -> None:
    file = write_parquet(tmp_path / "few.parquet", image=encoded(pictures(5)))
    load_images(config(file))
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "data.image_column: there is no column 'image'; did you mean 'imge'? There are: imge, label, size"),
        ({"image_column": "size"}, "data.image_column: the column 'size' holds Value('float64'), not images"),
        (
            {"image_column": "imge", "label_column": "class"},
            "data.label_column: there is no column 'class'. There are: imge, label, size",
        ),
        (
            {"image_column": "imge", "label_column": "label"},
            "data.label_column: the column 'label' holds Value('string'), not whole numbers",
        ),
        (
            {"train_split": "trian"},
            "data.train_split: there is no split 'trian'; did you mean 'train'? There are: train",
        ),
        ({"heldout_split": "test"}, "data.heldout_split: there is no split 'test'. There are: train"),
        ({"heldout_count": 3}, "data.heldout_count: holding out 3 of 3 images leaves none to train on"),
    ],
)
def test_what_a_table_does_not_have_is_named_with_what_it_has(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    file = write_parquet(
        tmp_path / "odd.parquet", imge=encoded(pictures(3)), label=["a", "b", "c"], size=[0.1, 0.2, 0.3]
    )
    with pytest.raises(DataError) as caught:
        load_images(config(file, **options))
    assert str(caught.value) == message


@pytest.mark.parametrize("content", [b"this is no image", png(Image.new("L", (6, 6), 9))[:-30], None])
def test_a_picture_that_cannot_be_read_is_named_by_its_row(tmp_path: Path, content: bytes | None) -> None:
    column = encoded(pictures(5))
    column[4]["bytes"] = content
    file = write_parquet(tmp_path / "broken.parquet", image=column)
    with pytest.raises(DataError, match=r"image 4 of .*broken\.parquet: "):
        load_images(config(file))


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


@pytest.mark.parametrize("kind", ["text file", "empty folder"])
def test_a_path_without_images_says_what_it_could_be(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    path.write_text("hello") if kind == "text file" else path.mkdir()
    with pytest.raises(DataError, match="is neither a parquet file nor a folder of parquet files or images"):
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


def test_cifar10_loads_from_its_parquet_files(shared_data: Path) -> None:
    data = load_images(
        config(
            shared_data / "cifar10",
            image_size=32,
            image_column="img",
            label_column="label",
            train_split="test",
            heldout_split="train",
            heldout_count=100,
        )
    )
    assert data.train.labels is not None
    assert data.train.images.shape == (4000, 3, 32, 32)
    assert data.heldout.images.shape == (100, 3, 32, 32)
    assert set(data.train.labels.tolist()) == set(range(10))
    # Of CIFAR-10 as published, over all pixels and channels: mean 0.473, standard deviation 0.251.
    levels = data.train.images.float() / 255
    assert levels.mean().item() == pytest.approx(0.473, abs=0.01)
    assert levels.std().item() == pytest.approx(0.251, abs=0.01)


def test_photographs_shrink_to_what_averaging_blocks_gives(shared_data: Path) -> None:
    source = shared_data / "flickr8k64" / "test.parquet"
    large = load_images(config(source, image_size=64, heldout_count=50)).heldout.images.float()
    small = load_images(config(source, image_size=32, heldout_count=50)).heldout.images.float()
    blocks = torch.nn.functional.avg_pool2d(large, 2)
    # A bicubic filter is sharper than a box, so they agree closely in the mean and only roughly at edges.
    assert (small - blocks).abs().mean().item() < 4
