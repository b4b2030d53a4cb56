"""Memory that a process of ours frees is used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of the second of two large blocks that are allocated, written and freed.
COUNT_FAULTS = """
import resource
from scalelong.cli import keep_freed_memory

{tuned}
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(2**26)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del block
print(faults)
"""


def faults(tuned: str) -> int:
    command = [sys.executable, "-c", COUNT_FAULTS.format(tuned=tuned)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives freed memory back at once")
def test_a_block_that_was_freed_costs_no_page_faults_when_it_is_needed_again() -> None:
    pages = 2**26 // 4096
    # A few pages of the interpreter's own are allowed; pages may be larger than 4 KiB, but not all of them.
    assert faults("assert keep_freed_memory()") < pages // 100
    assert faults("") > pages // 100
