"""metrics.jsonl: one JSON object per line, only ever appended to, and cut back where a run resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..utils.atomic import writing

TIMES = ("seconds", "images_per_second")
"""The fields that differ between two runs of the same recipe."""


class MetricsLog:
    """The lines of one run.

    A checkpoint records the size of the file; `cut(size)` brings the file back to it, so that a resumed run writes
    every line exactly once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({key: storable(value) for key, value in record.items()}, ensure_ascii=False)
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def synced_size(self) -> int:
        """The length of the file in bytes, once all of it is on the disk; 0 before its first line."""
        if not self.path.exists():
            return 0
        with writing(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut(self, size: int) -> None:
        """Drop what came after `size` bytes, a line that was written in part included."""
        if self.path.exists() and self.path.stat().st_size > size:
            with writing(self.path):
                os.truncate(self.path, size)

    def last_step(self) -> int:
        """The step of the last line, 0 if there is none."""
        lines = read_metrics(self.path) if self.path.exists() else []
        return lines[-1]["step"] if lines else 0


def storable(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines that were written whole."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
