"""Memory that a process of ours frees is used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of the second of two large blocks that are allocated, written and freed: as it is, and tuned.
COUNT_FAULTS = """
import resource
from scalelong.cli import keep_freed_memory

def faults():
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = bytearray(2**26)
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        del block
    return found

print(faults())
assert keep_freed_memory()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives freed memory back at once")
def test_a_block_that_was_freed_costs_no_page_faults_when_it_is_needed_again() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True)
    plain, tuned = map(int, done.stdout.split())
    pages = 2**26 // 4096
    # A few pages of the interpreter's own are allowed; pages may be larger than 4 KiB, but not all of them.
    assert tuned < pages // 100
    assert plain > pages // 100
