"""Files that are complete or absent, folders that one process at a time writes to, and checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

CHUNK = 1 << 20

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


class Damaged(Exception):
    """Why a file is not, or a folder does not hold, what was written."""


class WriteError(OSError):
    """A file that could not be written: the message says which, why, and what to do."""


class Busy(ValueError):
    """Another process works in the folder."""


class Files:
    """What a save does to the disk. Every method raises OSError, and nothing else, when the disk refuses."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write_bytes(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write one safetensors file; names that share a tensor share its bytes."""
        library = import_safetensors()
        kept, aliases = without_aliases(tensors)
        try:
            # The library's own save_model names tied weights in the metadata the same way: alias to kept.
            library.torch.save_file(kept, path, metadata=aliases or None)
        except library.SafetensorError as error:
            raise as_os_error(error, path) from error

    def sync(self, path: Path) -> None:
        """Wait until a file, or the entries of a folder, are on the disk."""
        if os.name == "nt" and path.is_dir():  # Windows has no handle for a folder, and orders its entries itself.
            return
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For writing a file: the system does not say which one it was when the disk is full, nor what to do."""
    try:
        yield
    except OSError as error:
        free = free_space(path)
        space = "" if free is None or error.errno not in NO_SPACE else f", {human_size(free)} are free"
        reason = f"{error.strerror or error}{space}"
        raise WriteError(f"could not write {path}: {reason}. {advice_for(error.errno)}") from error


def advice_for(number: int | None) -> str:
    """What to do about an error of the system."""
    if number in NO_SPACE:
        return "Free some space, then give the command again."
    if number in NO_ACCESS:
        return "Choose a folder that you can write to."
    return "Check the disk, then give the command again."


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file under a temporary name, sync it and give it its name: it is complete or not there."""
    # Named after the process: two that write the same file must not write into each other's.
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    files = Files()
    try:
        with writing(path):
            write(temporary)
            # Some libraries make files that nobody else may read.
            temporary.chmod(0o666 & ~current_umask())
            files.sync(temporary)
            os.replace(temporary, path)
            files.sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 that is complete or, as before, the old one."""
    atomic_write(path, lambda temporary: Files().write_bytes(temporary, text.encode()))


@contextmanager
def locked(file: Path, busy: str, *, wait: float | None = 0) -> Iterator[None]:
    """Hold a lock file; raises Busy if another process does. The system releases it when this process ends in any way.

    `busy` says what the other process does; `wait` is how many seconds to wait for it, None for as long as it takes.
    A folder that was made for the lock is removed if nothing else was written to it.
    """
    folder = file.parent
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=-1 if wait is None else wait)
    except Timeout as error:
        raise Busy(f"{busy}: wait for it, or stop it first") from error
    try:
        yield
    finally:
        if is_new and folder.is_dir() and os.listdir(folder) == [file.name]:
            shutil.rmtree(folder, ignore_errors=True)  # Windows keeps a file that is open.
        lock.release()


def current_umask() -> int:
    """What a new file's permissions lack; the system tells it only to those who set it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory of their own: the file may be removed afterwards."""
    with import_safetensors().safe_open(path, framework="pt") as file:
        # Without the clone a tensor would stay mapped to the file, and a file system that goes away takes it along.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        aliases = file.metadata() or {}
    return tensors | {alias: tensors[kept] for alias, kept in aliases.items() if kept in tensors}


def without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What safetensors accepts: one contiguous CPU tensor for each piece of memory, and the names left out."""
    first_with: dict[tuple[Any, ...], str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        first = first_with.setdefault(identity(name, tensor), name)
        if first != name:
            aliases[name] = first
            continue
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        # Two views that only overlap are two tensors: each is written whole.
        kept[name] = plain.clone() if storage in storages else plain
        storages.add(storage)
    return kept, aliases


def identity(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two names of the same values in the same memory; an empty tensor has no memory to share."""
    if not tensor.numel():
        return (name,)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def describe(path: Path) -> tuple[int, str]:
    return path.stat().st_size, sha256_of(path)


def verify_file(path: Path, size: int, digest: str | None) -> None:
    """Raise Damaged if a file is not as it was described; without a digest only its size is compared."""
    if path.is_symlink() or not path.is_file():
        raise Damaged(f"{path.name} is missing")
    found = path.stat().st_size
    if found != size:
        raise Damaged(f"{path.name} has {found} bytes instead of {size}")
    if digest is not None and sha256_of(path) != digest:
        raise Damaged(f"{path.name} does not match its checksum")


def to_json(value: Any) -> bytes:
    """Python's JSON writes a float so that reading it gives the same float."""
    return json.dumps(value, indent=1).encode()


def human_size(count: float) -> str:
    """
    >>> human_size(1_234_567)
    '1.2 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def free_space(path: Path) -> int | None:
    """Free bytes where `path` is or would be; None where the system does not say."""
    existing: Iterable[Path] = (place for place in (path, *path.parents) if place.exists())
    try:
        return shutil.disk_usage(next(iter(existing))).free
    except (OSError, StopIteration):
        return None


def as_os_error(error: Exception, path: Path) -> OSError:
    """The library reports the system's error number in its text only."""
    found = re.search(r"os error (\d+)", str(error))
    if found is None:
        return OSError(str(error))
    number = int(found[1])
    return OSError(number, os.strerror(number), str(path))


def import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError('checkpoints and prepared data need safetensors: pip install "scalelong[train]"') from error
    return safetensors
