"""What the page of a run says about its collapse: the answer of `scalelong why`, as why.json has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .blocks import Block, Table, Text
from .numbers import show
from .runs import read_json

NOTE = (
    "Replays from step {start} on, to step {end}, of a run that collapsed after step {collapse}. A change counts if it "
    "saves clearly more replays than none (Fisher's exact test, 5 %)."
)


@dataclass(frozen=True)
class Row:
    """A change, and how many of its replays were saved."""

    label: str
    group: str
    saved: int
    of: int
    loss: float | None = None


@dataclass(frozen=True)
class Why:
    """The content of why.json that a page shows."""

    checkpoint: int
    collapse: int
    end: int
    sentence: str
    command: str
    changes: list[Row] = field(default_factory=list)


def why_blocks(folder: Path, warnings: list[str]) -> Sequence[Block]:
    """The sentence, the table and the command; nothing where nobody asked."""
    found = read_json(folder / "why.json", Why, None, warnings)
    if found is None:
        return []
    rows = [(row.label, row.group, f"{row.saved} of {row.of}", show(row.loss)) for row in found.changes]
    note = NOTE.format(start=show(found.checkpoint), end=show(found.end), collapse=show(found.collapse))
    return [
        Text(found.sentence, "list"),
        Table("Replays", ("changed", "kind", "survived", "mean loss at the end"), rows, note=note),
        Text("What to do", "command", [found.command]),
    ]
