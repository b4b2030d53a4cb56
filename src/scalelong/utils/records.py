"""How the files of a run are read by its own package, by comparisons and by reports, which do not import each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def sealed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a list with the SHA-256 of the rest of it."""
    return {**entry, "sha256": hashlib.sha256(json.dumps(entry).encode()).hexdigest()}


def unsealed(entry: Any) -> Any:
    """What was sealed, or an entry of an older version; raises ValueError if it is not as it was written.

    >>> unsealed(sealed({"step": 1}) | {"step": 2})
    Traceback (most recent call last):
    ValueError: an entry does not match its checksum
    """
    if not isinstance(entry, Mapping) or "sha256" not in entry:
        return entry
    content = {key: value for key, value in entry.items() if key != "sha256"}
    if sealed(content)["sha256"] != entry["sha256"]:
        raise ValueError("an entry does not match its checksum")
    return content


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe by its dotted keys.

    >>> flatten({"a": {"b": 1}, "c": [2, 3]})
    {'a.b': 1, 'c': [2, 3]}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def read_lines(path: Path) -> list[str]:
    """The lines of a log that have their end; none if there is no log."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def parse_lines(lines: Iterable[str]) -> tuple[list[dict[str, Any]], int]:
    """The records of metrics.jsonl, each of a step, and how many lines are none.

    >>> parse_lines(['{"step": 1, "loss": 0.5}', '{"step": 2, "lo'])
    ([{'step': 1, 'loss': 0.5}], 1)
    """
    records, broken = [], 0
    for line in lines:
        try:
            record = json.loads(line)
            broken += not isinstance(record["step"], int)
            records += [record] if isinstance(record["step"], int) else []
        except (ValueError, TypeError, LookupError, RecursionError):
            broken += 1
    return records, broken


def log_damage(path: Path, saved: Mapping[str, Any]) -> str | None:
    """What is lost of metrics.jsonl by what a checkpoint says of it; None if nothing is, or it says nothing."""
    if "metrics_sha256" not in saved:
        return None
    content = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(content[: saved["metrics_size"]]).hexdigest() == saved["metrics_sha256"]:
        return None
    step, count = saved["step"], saved["metrics_lines"]
    left = sum(line["step"] <= step for line in parse_lines(read_lines(path))[0])
    lost = f"{count - left} of {count} lines up to step {step} are lost" if left < count else "lines have changed"
    return f"{path.name} is not as the checkpoint of step {step} left it: {lost}"


def damage_of_run(folder: Path) -> str | None:
    """What is lost of the log in a run's folder, by what its newest checkpoint says."""
    states = sorted(folder.glob("checkpoints/step-*/state.json"), key=lambda file: (len(file.parent.name), file))
    try:
        return log_damage(folder / "metrics.jsonl", json.loads(states[-1].read_bytes())) if states else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # A checkpoint that nobody can resume from.
        return None


def is_reading(names: Iterable[str]) -> bool:
    """Whether a line of metrics.jsonl with these numbers is one of the monitor.

    >>> is_reading(["step", "block/mid_block/feature"]), is_reading(["step", "loss"])
    (True, False)
    """
    return any(name.startswith(("skip", "block/")) for name in names)


def trained_seconds(times: Iterable[tuple[float, float]], begins: Sequence[float]) -> float | None:
    """The time of all sessions of a run, from the steps and seconds that it logged; None if there are none.

    The clock begins anew with each session. `begins` are the steps that they began after, in their order. A line is of
    the last session that began before its step, because what was logged beyond that step was cut off then.

    >>> trained_seconds([(5, 60.0), (8, 90.0)], [0, 5])
    150.0
    """
    longest: dict[int, float] = {}
    for step, seconds in times:
        session = max((place for place, begin in enumerate(begins) if begin < step), default=0)
        longest[session] = max(seconds, longest.get(session, 0.0))
    return sum(longest.values()) if longest else None
