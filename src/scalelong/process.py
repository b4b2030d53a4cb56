"""A setting for processes that are ours alone, such as those of the command line; a library's caller keeps its own."""

from __future__ import annotations

import ctypes
import platform

# glibc's numbers of its own options, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let the process use freed memory again instead of giving it back; whether the system's library can be told so.

    A step on the CPU allocates and frees the same large tensors over and over. By default glibc asks the system for
    each and returns it, and the system clears every page of it again: 40,000 page faults per training step of a small
    U-ViT. Drawing 16 images at once is 1.3 to 1.5 times as fast without them (benchmarks/sample.py), training hardly
    so on a machine that is idle. The most that the process ever holds stays the same.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, LARGEST) == 1 for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
