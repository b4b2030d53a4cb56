"""For processes that are ours alone, such as those of the command line: their memory, and how they end."""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
from typing import NoReturn

# glibc's numbers of its own options, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 2**31 - 1


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


def end_process(code: int) -> NoReturn:
    """End the process after its exit handlers, but without taking Python apart.

    The threads in which torch sends tensors between processes on CPUs (gloo) outlive the end of their group, to which
    torch itself keeps references. Where one of them lets go of its last tensor just when Python is taken apart, it
    aborts the process ("terminate called without an active exception"), although all of its work was done.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
