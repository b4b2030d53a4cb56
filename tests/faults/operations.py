"""What a process asks of the file system, one operation after the other, with a function that is called before each."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import safetensors.torch

# Path's methods and shutil call these; PIL, json and the log of a run open files by themselves.
NAMES = ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "truncate", "ftruncate")

Watch = Callable[[str, tuple[Any, ...]], None]
"""Called with the name of an operation, and what it is given."""


def ignore(name: str, args: tuple[Any, ...]) -> None:
    """For those who look at one side only."""


@contextmanager
def watched(before: Watch = ignore, after: Watch = ignore) -> Iterator[None]:
    """Call functions before and after each operation that changes or syncs something; nothing waits for a disk."""
    inside = False

    def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            nonlocal inside
            if inside or (name == "open" and not writes(*args, **options)):
                return original(*args, **options)
            inside = True
            try:
                before(name, args)
                result = None if name == "fsync" else original(*args, **options)
                after(name, args)
                return result
            finally:
                inside = False

        return operation

    opened = around("open", io.open)
    with (
        patch.object(io, "open", opened),
        patch.object(builtins, "open", opened),
        patch.object(safetensors.torch, "save_file", around("save", safetensors.torch.save_file)),
        patch.multiple(os, **{name: around(name, getattr(os, name)) for name in NAMES}),
    ):
        yield


def writes(file: Any, mode: str = "r", *args: Any, **options: Any) -> bool:
    """Whether a call of `open` is one to write; a descriptor is of a file that was opened before."""
    return not isinstance(file, int) and any(letter in mode for letter in "wax+")


class At:
    """Counts operations, and does something before number `number`, and before each later one if it is `lasting`."""

    def __init__(self, number: int, action: Callable[[], None] = lambda: None, *, lasting: bool = False) -> None:
        self.number, self.action, self.lasting = number, action, lasting
        self.count = 0

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        self.count += 1
        if self.count == self.number or (self.lasting and self.count > self.number):
            self.action()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def find_no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def counted(function: Callable[[], object]) -> int:
    """How many operations a function needs."""
    counter = At(-1)
    with watched(counter):
        function()
    return counter.count
