"""Comparisons so small that a law about them takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalelong.compare.grid import Plan, make_plan

TINY = (
    *("model.embed_dim=16", "model.depth=4", "model.num_heads=2", "data.validation_count=8", "training.batch_size=16"),
    *("training.steps=10", "sampling.steps=1"),
    # So few steps learn nothing: a run survives them unless it ends far above where it began.
    "training.must_gain=-10",
)

# What depends on the clock, or on when and how often a comparison was started.
OF_THE_CLOCK = {"created", "updated", "seconds", "seconds_per_step"}
OF_THE_CLOCK |= {"speedup_seconds", "verdict_seconds", "sentence_seconds"}


def tiny_plan(*methods: str, seeds: int = 2, more: tuple[str, ...] = (), **crossed: Any) -> Plan:
    return make_plan("digits", methods or ("none", "cs"), seeds=seeds, overrides=[*TINY, *more], **crossed)


def lasting(content: Any) -> Any:
    """The results without what depends on the clock."""
    if isinstance(content, dict):
        return {key: lasting(value) for key, value in content.items() if key not in OF_THE_CLOCK}
    return [lasting(item) for item in content] if isinstance(content, list) else content


def files_in(folder: Path) -> dict[str, int]:
    """When each file was last changed."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
