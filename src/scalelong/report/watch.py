"""Reads the folders again whenever something in them changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .page import Content, read_content

POLL_SECONDS = 2.0

QUIET_POLLS = 10
"""A run draws its last samples after its last step."""

WATCHED = ("*.json", "*.jsonl", "*.yaml", "samples/*.png")

State = dict[Path, tuple[int, int]]


def watch_content(sources: Sequence[Path], wait: Callable[[float], None] = time.sleep) -> Iterator[Content]:
    """The content now and after every change; ends when all is finished and nothing has changed for a while."""
    before: State | None = None
    content, quiet = None, 0
    while content is None or not content.finished or quiet < QUIET_POLLS:
        # Looked at before it is read: what is written meanwhile is a change for the next round.
        now = state_of(sources)
        quiet = quiet + 1 if now == before else 0
        if now != before:
            content, before = read_content(sources), now
            yield content
        wait(POLL_SECONDS)


def state_of(sources: Sequence[Path]) -> State:
    """Size and time of every file that a page is made of; checkpoints are none of them."""
    found: State = {}
    for source in sources:
        for folder in (source, *source.glob("runs/*/*")):
            for path in (path for pattern in WATCHED for path in folder.glob(pattern)):
                try:
                    status = path.stat()
                except OSError:
                    continue  # Replaced just now.
                found[path] = (status.st_size, status.st_mtime_ns)
    return found
