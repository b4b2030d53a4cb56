"""Laws of loading: every image once, with its own label and captions, and an error says what to set."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from image_cases import config, encoded, pictures, saved, stacked, write_parquet
from sklearn.datasets import load_digits

from scalelong.data import DataError, ImageSet, caption_of, load_images


def test_digits_are_scikit_learns_with_grey_levels_0_to_16_stretched_to_0_to_255() -> None:
    data = load_images(config("sklearn:digits", image_size=8, channels=1, label_column="label", validation_count=97))
    original = load_digits()
    everything = torch.cat([data.train.images, data.validation.images]).flatten(1)
    assert everything.shape == (1797, 64) and everything.dtype == torch.uint8
    stretched = [[round(level * 255 / 16) for level in image] for image in original.data.tolist()]
    assert sorted(everything.tolist()) == sorted(stretched)
    assert data.train.labels is not None and data.validation.labels is not None
    assert torch.cat([data.train.labels, data.validation.labels]).bincount().tolist() == [
        (original.target == digit).sum() for digit in range(10)
    ]


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
            "data.label_column: the column 'label' holds Value('string'), not whole numbers (row 2)",
        ),
        (
            {"image_column": "imge", "caption_column": "labels"},
            "data.caption_column: there is no column 'labels'; did you mean 'label'? There are: imge, label, size",
        ),
        (
            {"image_column": "imge", "caption_column": "size"},
            "data.caption_column: the column 'size' holds Value('float64'), not a text or a list of texts (row 2)",
        ),
        (
            {"train_split": "trian"},
            "data.train_split: there is no split 'trian'; did you mean 'train'? There are: train",
        ),
        ({"validation_split": "test"}, "data.validation_split: there is no split 'test'. There are: train"),
        ({"validation_count": 3}, "data.validation_count: taking 3 of 3 images for validation leaves none to train on"),
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


def table_of(file: Path, labels: list[Any] | None = None, captions: list[Any] | None = None, count: int = 7) -> Path:
    columns = {"label": labels, "text": captions}
    others = {name: values for name, values in columns.items() if values is not None}
    return write_parquet(file, image=encoded(pictures(count)), **others)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2, 3, 2, 1, 0], "labels must lie in 0 … 2 (row 3: 3)"),
        ([0, 1, -1, 1, 2, -7, 0], "labels must lie in 0 … 2 (row 2: -1, row 5: -7)"),
        ([9] * 7, "labels must lie in 0 … 2 (row 1: 9, row 2: 9, row 4: 9, row 5: 9, row 6: 9)"),
        ([0, 1, None, 1, 2, 0, 0], "the column 'label' holds Value('int64'), not whole numbers (row 2)"),
        ([0.0] * 7, "the column 'label' holds Value('float64'), not whole numbers (row 1, row 2, row 4, row 5, row 6)"),
    ],
)
def test_labels_that_name_no_class_are_refused_with_their_rows(tmp_path: Path, labels: list[Any], message: str) -> None:
    file = table_of(tmp_path / "some.parquet", labels)
    with pytest.raises(DataError) as caught:
        load_images(config(file, label_column="label"), classes=3)
    assert str(caught.value) == f"data.label_column: {message}"


def test_without_a_number_of_classes_only_negative_labels_are_refused(tmp_path: Path) -> None:
    assert load_images(config(table_of(tmp_path / "a.parquet", [9] * 7), label_column="label")).train.labels is not None
    with pytest.raises(DataError, match=r"labels must not be negative \(row 1: -1\)"):
        load_images(config(table_of(tmp_path / "b.parquet", [0, -1, 0, 0, 0, 0, 0]), label_column="label"))


@pytest.mark.parametrize(
    "captions",
    [
        ["a", "b", "", "d", "e", "  ", "g"],
        ["a", "b", None, "d", "e", "", "g"],
        [["a"], ["b", "b"], [], ["d"], ["e"], ["f", ""], ["g"]],
        [["a"], ["b"], None, ["d"], ["e"], [None], ["g"]],
    ],
    ids=["text", "text or null", "lists", "lists or null"],
)
def test_empty_captions_are_refused_with_their_rows(tmp_path: Path, captions: list[Any]) -> None:
    file = table_of(tmp_path / "some.parquet", captions=captions)
    with pytest.raises(DataError) as caught:
        load_images(config(file, caption_column="text"))
    assert str(caught.value) == "data.caption_column: there are empty captions (row 2, row 5)"


@pytest.mark.parametrize("several", [False, True])
def test_captions_are_those_of_their_images(tmp_path: Path, several: bool) -> None:
    texts = [(f"{row} a", f"{row} b") if several else (f"{row} a",) for row in range(7)]
    file = table_of(tmp_path / "some.parquet", captions=[list(row) if several else row[0] for row in texts])
    data = load_images(config(file, caption_column="text"))
    assert data.train.captions == tuple(texts[row] for row in (1, 2, 4, 5, 6))
    assert data.validation.captions == (texts[0], texts[3])


def test_one_of_several_captions_is_chosen_for_each_example_by_its_seed() -> None:
    captions = (("a",), ("b", "c"), ("d", "e", "f"))
    data = ImageSet(torch.zeros(3, 3, 6, 6, dtype=torch.uint8), captions=captions)
    picked = data.pick(torch.tensor([2, 0, 1, 2]), torch.tensor([4, 4, 4, 5]))
    assert picked.captions == ("e", "a", "b", "f")
    assert picked.labels is None and picked.text is None


def test_every_caption_is_as_likely_as_the_others() -> None:
    seeds = torch.randint(2**63 - 1, (5000,)).tolist()
    drawn = torch.tensor([caption_of(seed, 5) for seed in seeds]).bincount(minlength=5)
    # Six standard deviations of a count of 5000 choices at 1 in 5.
    assert (drawn - 1000).abs().max() < 6 * (5000 * 0.2 * 0.8) ** 0.5


def broken_rows(file: Path, count: int, *broken: int) -> tuple[Path, list[Any]]:
    """A file whose images say the number of their row, with a label and a caption that say it too."""
    items = pictures(count)
    column = encoded(items)
    for row in broken:
        column[row] = {"bytes": saved(items[row])[:-30], "path": f"{row}.png"}
    numbers = list(range(count))
    write_parquet(file, image=column, label=numbers, text=[f"caption {row}" for row in numbers])
    return file, items


def test_a_broken_image_is_left_out_with_its_label_and_caption(tmp_path: Path, caplog: Any) -> None:
    # Rows 0 and 100 are for validation; of those and of the others one each is broken.
    file, items = broken_rows(tmp_path / "some.parquet", 200, 100, 150)
    data = load_images(config(file, label_column="label", caption_column="text"))
    for part, rows in ((data.validation, [0]), (data.train, [row for row in range(1, 200) if row not in (100, 150)])):
        assert part.labels is not None and part.labels.tolist() == rows
        assert part.captions == tuple((f"caption {row}",) for row in rows)
        assert torch.equal(part.images, stacked([items[row] for row in rows]))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert message.startswith(f"skipped: 2 of 200 images of {file} could not be read (row 150 (150.png): OSError: ")
    assert "row 100 (100.png): OSError: " in message


def test_leaving_out_an_image_copies_none_of_the_others(tmp_path: Path) -> None:
    file, _ = broken_rows(tmp_path / "some.parquet", 200, 150)
    images = load_images(config(file)).train.images
    # The memory that was taken for all 198 images at first, of which one is missing.
    assert len(images) == 197 and images.untyped_storage().nbytes() == 198 * images[0].numel()


@pytest.mark.parametrize(("count", "broken"), [(3, [2]), (100, [1, 2]), (300, [1, 2, 3, 4])])
def test_more_than_one_percent_broken_is_an_error_that_names_the_first(
    tmp_path: Path, count: int, broken: list[int]
) -> None:
    file, _ = broken_rows(tmp_path / "some.parquet", count, *broken)
    with pytest.raises(DataError) as caught:
        load_images(config(file))
    message = str(caught.value)
    assert message.startswith(
        f"data.source: {len(broken)} of {count} images of {file} could not be read (row {broken[0]}"
    )
    assert message.endswith("; more than 1 % stops the run")
    assert "\n" not in message


def test_of_many_broken_images_all_are_counted_and_five_named(tmp_path: Path) -> None:
    file, _ = broken_rows(tmp_path / "some.parquet", 20, *range(1, 9))
    with pytest.raises(DataError, match=r"8 of 20 .*row 1 .*row 2 .*row 3 .*row 4 .*row 5 .* and 3 more\)"):
        load_images(config(file))


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_threads_changes_nothing(tmp_path: Path, workers: int) -> None:
    file, items = broken_rows(tmp_path / "some.parquet", 150, 149)
    data = load_images(config(file, label_column="label", workers=workers))
    assert data.train.labels is not None and data.train.labels.tolist() == [*range(1, 75), *range(76, 149)]
    assert torch.equal(data.train.images, stacked([items[row] for row in data.train.labels.tolist()]))


def test_cifar10_loads_from_its_parquet_files(shared_data: Path) -> None:
    data = load_images(
        config(
            shared_data / "cifar10",
            image_size=32,
            image_column="img",
            label_column="label",
            train_split="test",
            validation_split="train",
            validation_count=100,
        )
    )
    assert data.train.labels is not None
    assert data.train.images.shape == (4000, 3, 32, 32)
    assert data.validation.images.shape == (100, 3, 32, 32)
    assert set(data.train.labels.tolist()) == set(range(10))
    # Of CIFAR-10 as published, over all pixels and channels: mean 0.473, standard deviation 0.251.
    levels = data.train.images.float() / 255
    assert levels.mean().item() == pytest.approx(0.473, abs=0.01)
    assert levels.std().item() == pytest.approx(0.251, abs=0.01)


def test_photographs_shrink_to_what_averaging_blocks_gives(shared_data: Path) -> None:
    source = shared_data / "flickr8k64" / "test.parquet"
    large = load_images(config(source, image_size=64, validation_count=50)).validation.images.float()
    small = load_images(config(source, image_size=32, validation_count=50)).validation.images.float()
    blocks = torch.nn.functional.avg_pool2d(large, 2)
    # A bicubic filter is sharper than a box, so they agree closely in the mean and only roughly at edges.
    assert (small - blocks).abs().mean().item() < 4
