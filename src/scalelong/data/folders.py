"""Images in a folder or a zip: a column of pictures, and one of labels if their folders are classes."""

from __future__ import annotations

import difflib
import glob
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from ..utils.atomic import human_size
from .config import DataError, first_line

TARS = {".tar", ".tgz", ".gz"}
FILES = {".parquet", ".zip", *TARS}
# In a folder of images, files that say something about them, or hold rows, are read by the `datasets` library.
METADATA = {"README.md", "metadata.csv", "metadata.jsonl"}

# The words in the names of folders or files by which `datasets` tells splits apart.
WORDS = {"train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation"}
SPLITS = {split: re.compile(rf"(^|[-._ 0-9])({words})([-._ 0-9]|$)") for split, words in WORDS.items()}

# Packed files that unpack to more are meant to fill the memory: the largest picture that is read has 268 MB of pixels,
# and photographs do not get 100 times as small.
LARGEST_MEMBER, LARGEST_RATIO = 1 << 28, 100

Columns = dict[str, Sequence[Any]]


class ZipMember(NamedTuple):
    """A file in an archive, read when it is needed; several threads may read at once."""

    archive: zipfile.ZipFile
    name: str

    def read(self) -> bytes:
        if (size := self.archive.getinfo(self.name).file_size) > LARGEST_MEMBER:
            raise ValueError(f"it has {human_size(size)} unpacked, more than any picture that is read")
        return self.archive.read(self.name)


def check_tars(source: Path) -> None:
    """Check each tar of a folder, of a pattern, or the one of this path."""
    names = [file.path for file in walk(source)] if source.is_dir() else sorted(glob.glob(str(source)))
    for path in map(Path, names):
        if path.suffix in TARS and tarfile.is_tarfile(path):
            check_tar(path)


def check_tar(path: Path) -> None:
    """Raise DataError, before anything is unpacked, for a tar with members that no data set has, or with too many."""
    most, total = LARGEST_RATIO * path.stat().st_size + LARGEST_MEMBER, 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                total += member.size
                if member.size > LARGEST_MEMBER or total > most:
                    what = f"{member.name} has" if member.size > LARGEST_MEMBER else "its files have"
                    size = human_size(max(member.size, total))
                    raise DataError(f"data.source: {str(path)!r}: {what} {size} unpacked or more: that is no data set")
    except (OSError, tarfile.TarError, zlib.error, EOFError) as error:
        raise DataError(f"data.source: {str(path)!r} is not a tar that can be read: {first_line(error)}") from error


def zip_columns(path: Path) -> Columns:
    """The images of a zip in the order of their names; folders, if there are several of the same depth, are classes."""
    # Not by the `datasets` library: it unpacks the archive, and takes the labels from the folder around it.
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"data.source: {str(path)!r} is not a zip that can be read: {first_line(error)}") from error
    names = sorted(filter(is_image, archive.namelist()))
    if not names:
        raise DataError(f"data.source: there are no images in {str(path)!r}")
    return labelled([ZipMember(archive, name) for name in names], names, classes_of(names))


def folder_splits(folder: Path) -> dict[str, Columns] | None:
    """The images of a folder by split, in the order of their names; None if it holds other data, or none."""
    # Not by the `datasets` library: it walks the folder 45 times. Rows, labels and splits are those it would give.
    start = len(str(folder)) + 1
    names = sorted(file.path[start:] for file in walk(folder))
    if any(path.suffix in FILES or path.name in METADATA for path in map(PurePath, names)):
        return None
    splits = split_names(list(filter(is_image, names)))
    # From all of them, because a class has the same number in every split.
    classes = classes_of([name for some in splits.values() for name in some])
    place = partial(os.path.join, folder)
    return {split: labelled(list(map(place, some)), some, classes) for split, some in splits.items()} or None


def walk(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Every file below a folder in the order of names, none of them hidden, with one look at each folder."""
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if not entry.name.startswith((".", "__"))), key=lambda one: one.name)
    for entry in entries:
        if entry.is_dir():
            yield from walk(entry.path)
        elif entry.is_file():
            yield entry


def neighbour_of(path: Path) -> str:
    """The end of a message: the file or folder beside it with the closest name, if one is close."""
    folder = path.absolute().parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {os.path.join(path.parent, close[0])!r}?" if close else ""


def is_image(name: str) -> bool:
    """Whether a file is named as an image; what is hidden, or macOS adds to archives, is none."""
    from PIL import Image

    path = PurePath(name)
    hidden = any(part.startswith((".", "__MACOSX")) for part in path.parts)
    return not hidden and Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN


def split_names(names: Sequence[str]) -> dict[str, Sequence[str]]:
    """The names by the split that their folders tell, else the files themselves; all are `train` if neither does.

    >>> split_names(["train/cat/0.png", "test/cat/1.png", "more/2.png"])
    {'train': ['train/cat/0.png'], 'test': ['test/cat/1.png']}
    """
    for part in (slice(None, -1), slice(-1, None)):
        words = {name: PurePath(name).parts[part] for name in names}
        splits = {key: [name for name in names if any(map(word.search, words[name]))] for key, word in SPLITS.items()}
        if any(splits.values()):
            return {split: some for split, some in splits.items() if some}
    return {"train": names} if names else {}


def classes_of(names: Sequence[str]) -> dict[str, int]:
    """The number of each class by its folder; none unless there are several folders, all of the same depth.

    >>> classes_of(["cat/0.png", "dog/0.png", "cat/1.png"])
    {'cat': 0, 'dog': 1}
    """
    folders = [PurePath(name).parent for name in names]
    classes = sorted({folder.name for folder in folders})
    if len(classes) == 1 or len({len(folder.parts) for folder in folders}) > 1:
        return {}
    return {name: number for number, name in enumerate(classes)}


def labelled(pictures: Sequence[Any], names: Sequence[str], classes: Mapping[str, int]) -> Columns:
    """The columns of pictures with these names."""
    labels = {"label": [classes[PurePath(name).parent.name] for name in names]} if classes else {}
    return {"image": pictures, **labels}
