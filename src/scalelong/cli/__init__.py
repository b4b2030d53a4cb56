"""The command line. It needs typer and rich, which are imported only when it runs."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import platform
import re
import signal
import sys
from types import FrameType
from typing import NoReturn

# glibc's numbers of its own options, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 2**31 - 1


# Controls of terminals: in the name of a file or a recipe they could move the cursor, or hide what is printed.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STOPPED = b"stopped: what is finished is kept, and the same command resumes\n"
SHOW_CURSOR = b"\x1b[?25h"


def main() -> None:
    """Run `scalelong`; where typer or rich is missing, say in one line how to install it."""
    signal.signal(signal.SIGINT, stop_at_once)
    prepare_process()
    try:
        from .app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f'error: the command line needs {package}: pip install "scalelong[train]"', file=sys.stderr)
        sys.exit(2)
    try:
        app(prog_name="scalelong")
    except SystemExit as end:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and isinstance(end.code, int | None):
            from ..utils.runtime import end_process

            end_process(end.code or 0)
        raise


def stop_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Ctrl-C before something is begun that must be ended well, while libraries are imported above all.

    An exception would not do: it ends up in whatever a library makes of it, or in a page of traceback.
    """
    if os.environ.get("RANK", "0") == "0":
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + STOPPED)
    os._exit(128 + signal.SIGINT)


def printable(text: str) -> str:
    r"""A text without the controls of terminals, which are shown as Python writes them.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


class PrintableLines(logging.Formatter):
    """Warnings, which go to stderr as they are."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def prepare_process() -> None:
    """Settings of a process that is ours alone: its memory, its output, and how much libraries log."""
    keep_freed_memory()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableLines())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a letter such as κ then shows "?" in its place, instead of a traceback.
            stream.reconfigure(errors="replace")
    # A Hub that cannot be reached would otherwise log a dozen retries before our one line that says so.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")


def keep_freed_memory() -> bool:
    """Let the process use freed memory again instead of giving it back; whether the system's library can be told so.

    A step on the CPU allocates and frees the same large tensors over and over. By default glibc asks the system for
    each and returns it, and the system clears every page of it again: 40,000 page faults per training step of a small
    U-ViT. Sampling 16 images at once is 1.3 to 1.5 times as fast without them (benchmarks/sample.py), training hardly
    so on a machine that is idle. The most that the process ever holds stays the same.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, LARGEST) == 1 for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
