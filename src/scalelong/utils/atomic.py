"""Files that are complete or absent, safetensors among them; folders that one process at a time writes to."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from .runtime import process_exists

# For so long a process of another machine, which is not known here, does not pause while it writes a file.
QUIET_SECONDS = 60.0

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
        """Make a folder, and those around it; a power loss does not take it away again, with all that is in it."""
        missing = [place for place in (path, *path.parents) if not place.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for place in missing:
            self.sync(place.parent)

    def write_bytes(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        write_tensors(path, tensors)

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
        if path.exists():
            shutil.rmtree(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For writing a file: the system does not say which one it was when the disk is full, nor what to do."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        space = f", {human_size(free_space(path))} are free" if error.errno in NO_SPACE else ""
        raise WriteError(f"could not write {path}: {error.strerror or error}{space}. {advice_for(error)}") from error


def advice_for(error: OSError) -> str:
    """What to do about an error of the system."""
    if error.errno in NO_SPACE:
        return "Free some space, then give the command again."
    if error.errno in NO_ACCESS:
        return "Choose a folder that you can write to."
    return "Check the disk, then give the command again."


def free_space(path: Path) -> int:
    """Free bytes where `path` is or would be."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


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


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file under a temporary name, sync it and give it its name: it is complete or not there."""
    # Named after the process: two that write the same file must not write into each other's.
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    files = Files()
    remove_left_behind(path.parent, f".tmp-*-{glob.escape(path.name)}")
    try:
        with writing(path):
            files.make_folder(path.parent)
            write(temporary)
            open_to_umask(temporary)
            files.sync(temporary)
            os.replace(temporary, path)
            files.sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, folder: Path) -> None:
    """Sync the files of a folder and give it its name: it is complete or not there."""
    files = Files()
    for path in (*temporary.rglob("*"), temporary):
        files.sync(path)
    files.rename(temporary, folder)
    files.sync(folder.parent)


def remove_left_behind(folder: Path, pattern: str) -> None:
    """Remove what killed processes left of files: whose process is gone from this machine and that nobody writes to."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            owner = next((int(part) for part in path.name.split("-") if part.isdigit()), 0)
            if not process_exists(owner) and time.time() - path.stat().st_mtime > QUIET_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def open_to_umask(path: Path) -> None:
    """Let others read a file as far as the umask does: some libraries make files for their owner alone."""
    umask = os.umask(0o077)  # The system tells it only to those who set it.
    os.umask(umask)
    path.chmod(0o666 & ~umask)


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
    Files().make_folder(folder)
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


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def describe_files(paths: Iterable[Path]) -> dict[str, Sequence[Any]]:
    """By name, the size in bytes and the SHA-256 of each file."""
    return {path.name: (path.stat().st_size, sha256_of(path)) for path in paths}


def verify_files(folder: Path, files: Mapping[str, Sequence[Any]], *, hashed: bool = True) -> None:
    """Raise Damaged unless a folder holds these files as they were described; sizes alone are quicker to compare."""
    for name, (size, digest) in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise Damaged(f"{name} is missing")
        if (found := path.stat().st_size) != size:
            raise Damaged(f"{name} has {found} bytes instead of {size}")
        try:
            if hashed and sha256_of(path) != digest:
                raise Damaged(f"{name} does not match its checksum")
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error


def to_json(value: Any) -> bytes:
    """Python's JSON writes a float so that reading it gives the same float."""
    return json.dumps(value, indent=1).encode()


def check_json(value: Any, where: str) -> None:
    """Raise unless JSON keeps the value exactly: no tuples, no number as a key, no tensors."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keeps only text keys, use {str(key)!r}")
            check_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which JSON does not keep. "
            "Use numbers, text, lists and dicts; tensors go into a group."
        )


def signed(content: Mapping[str, Any]) -> bytes:
    """JSON that ends with the SHA-256 of what stands before."""
    return to_json({**content, "sha256": hashlib.sha256(to_json(content)).hexdigest()})


def write_signed(path: Path, content: Mapping[str, Any]) -> None:
    atomic_write(path, lambda temporary: Files().write_bytes(temporary, signed(content)))


def read_signed(path: Path) -> dict[str, Any]:
    """The content of such a file; raises Damaged if it is missing or not as it was written."""
    try:
        raw = path.read_bytes()
        content: dict[str, Any] = json.loads(raw)
        del content["sha256"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Damaged(f"{path.name} cannot be read ({reason})") from error
    # Compared as bytes, so that a change anywhere is seen, even one that a parser forgives.
    if signed(content) != raw:
        raise Damaged(f"{path.name} does not match its checksum")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """As `read_signed`, and also what was written before such files were signed."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise Damaged(f"{path.name} holds a {type(content).__name__}, not keys and values")
    return read_signed(path) if "sha256" in content else content


# Safetensors: what goes in comes out to the bit, and names that share a tensor share it again.


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file; names that share a tensor share its bytes. Raises OSError when the disk refuses."""
    library = import_safetensors()
    kept, aliases = without_aliases(tensors)
    with system_errors(path):
        # The library's own save_model names tied weights in the metadata the same way: alias to kept.
        library.torch.save_file(kept, path, metadata=aliases or None)
    open_to_umask(path)


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """What safetensors says when the disk refuses as the system would say it."""
    try:
        yield
    except import_safetensors().SafetensorError as error:
        # The library reports the system's error number in its text only.
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise OSError(str(error)) from error
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in memory of their own: the file may be removed afterwards. Raises Damaged for others."""
    library = import_safetensors()
    try:
        with library.safe_open(path, framework="pt") as file:
            # Without the clone a tensor would stay mapped to the file, and a file system that goes away takes it along.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
            aliases = file.metadata() or {}
    except library.SafetensorError as error:
        raise Damaged(f"{path.name} is no safetensors file ({error})") from error
    return tensors | {alias: tensors[kept] for alias, kept in aliases.items() if kept in tensors}


def without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What safetensors accepts: one contiguous CPU tensor for each piece of memory, and the names left out."""
    first_with: dict[tuple[Any, ...], str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        # Equal for two names of the same values in the same memory; an empty tensor has no memory to share.
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = first_with.setdefault(same if tensor.numel() else (name,), name)
        if first != name:
            aliases[name] = first
            continue
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        # Two views that only overlap are two tensors: each is written whole.
        kept[name] = plain.clone() if storage in storages else plain
        storages.add(storage)
    return kept, aliases


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise, by name, if a tensor is not one that a file keeps whole."""
    if hasattr(tensor, "full_tensor"):
        raise ValueError(
            f"{name} is one process's shard of a tensor. Gather it on every process first, e.g. with "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(f"{name} is a {tensor.layout} tensor on {tensor.device}; only dense ones hold values to keep")


def import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError('checkpoints and prepared data need safetensors: pip install "scalelong[train]"') from error
    return safetensors
