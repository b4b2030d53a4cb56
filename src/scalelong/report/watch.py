"""Reads the folders again whenever something in them changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .page import Content, read_content

POLL_SECONDS = 2.0

WATCHED = ("*.json", "*.jsonl", "*.yaml", "samples/*.png")

State = dict[Path, tuple[int, int]]


def watch_content(sources: Sequence[Path], wait: Callable[[float], None] = time.sleep) -> Iterator[Content]:
    """The content now and after every change; ends when nothing is unfinished any more."""
    before: State | None = None
    while True:
        # Looked at before it is read: what is written meanwhile is a change for the next round.
        now = state_of(sources)
        if now != before:
            content, before = read_content(sources), now
            yield content
            if content.finished:
                return
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
