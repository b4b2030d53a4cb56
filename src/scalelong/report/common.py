"""Parts of the page that runs and comparisons share."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .blocks import Block, Command, Facts, Section, Series, Table, Text
from .numbers import NOTHING, duration, show
from .read import as_dict, as_list, as_text, finite
from .runs import RunFolder

PAPER_BAND = (0.5, 0.95)
"""The range of κ that the paper recommends for CS."""

VERSIONS = ("scalelong", "python", "torch", "diffusers", "accelerate", "datasets", "numpy")


def cs_area(kappa: Mapping[str, Any], count: int) -> Series:
    """The range of κ^(i−1) for the κ of the advice, or for those of the paper."""
    ends = [finite(end) for end in as_list(kappa.get("band"))]
    known = [end for end in ends if end is not None]
    low, high = (known[0], known[1]) if len(known) == 2 else PAPER_BAND
    where = "the band measured for this recipe" if len(known) == 2 else "of the paper"
    band = [(float(index), low ** (index - 1), high ** (index - 1)) for index in range(1, count + 1)]
    return Series(f"CS with κ from {show(low, 3)} to {show(high, 3)}, {where}", 0, band=band)


def warnings_section(key: str, unusual: Sequence[tuple[str, Sequence[str]]], notes: Sequence[str]) -> Section:
    """What happened in the runs, and what was wrong with the files."""
    blocks: list[Block] = []
    if notes:
        blocks.append(Text(list(dict.fromkeys(notes)), "warning"))
    rows = [(name, line) for name, lines in unusual for line in lines]
    if rows:
        blocks.append(Table("What happened", ("run", "event"), rows, folded=len(rows) > 8))
    nothing = "Nothing unusual: no spikes, skipped steps, rollbacks or diverged runs, and all files could be read."
    count = len(set(notes)) + len(rows)
    title = f"Warnings ({count})" if count else "Warnings"
    return Section(f"{key}-warnings", title, blocks or [Text([nothing], "empty")])


def advice_blocks(kappa: Mapping[str, Any], run: Path, target: Path) -> list[Block]:
    """The advice of kappa.json, or the command that makes it for the recipe of a run."""
    value = finite(kappa.get("kappa"))
    if value is None:
        text = "No advice was measured here. It takes seconds, from the recipe's own data, schedule and network:"
        recipe, file = (shlex.quote(str(path)) for path in (run / "config.yaml", target / "kappa.json"))
        return [Text([text], "empty"), Command("To measure it", f"scalelong kappa {recipe} --json > {file}")]
    band = [finite(end) for end in as_list(kappa.get("band"))]
    low, high = band if len(band) == 2 else (None, None)
    where = as_text(kappa.get("where"), "input")
    headline = f"κ = {show(value)} for CS; the band that matches the target's size is {show(low, 3)} to {show(high, 3)}"
    reasons = [as_text(reason) for reason in as_list(kappa.get("reasons"))]
    first = f"{headline}{', scaled after the norm' if where == 'after-norm' else ''}."
    return [Text([first, *(reason for reason in reasons if reason)], "list"), *advice_facts(kappa)]


def advice_facts(kappa: Mapping[str, Any]) -> list[Block]:
    sums = " to ".join(show(end, 3) for end in as_list(kappa.get("sum_of_squares")))
    rows = [
        ("long skips N", show(kappa.get("num_skips"))),
        ("Σκᵢ² aimed at", sums or NOTHING),
        ("block gain M₀", show(kappa.get("block_gain"), 3)),
        ("images measured", show(kappa.get("images"))),
    ]
    return [Facts("Measured", rows)]


def run_facts(run: RunFolder) -> Facts:
    """What one would ask first about a run."""
    data = as_dict(run.config.get("data"))
    size, channels = show(data.get("image_size")), show(data.get("channels"))
    model = as_dict(run.config.get("model"))
    rows = [
        ("recipe", run.recipe),
        ("description", as_text(run.config.get("description"), NOTHING)),
        ("data", f"{as_text(data.get('source'), NOTHING)}, {size}×{size} pixels, channels: {channels}"),
        ("network", ", ".join(f"{key} {show(value)}" for key, value in model.items() if is_plain(value)) or NOTHING),
        ("scaling", run.method),
        ("steps × batch", f"{show(run.steps)} × {show(run.setting('training.batch_size'))}"),
        ("learning rate", show(run.setting("optim.lr"))),
        ("seed", show(run.seed)),
        ("time so far", duration(run.seconds)),
    ]
    return Facts("The run", rows)


def is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, dict | list | bool)


def short_commit(value: Any) -> str:
    """
    >>> short_commit("f4e23c7d552c23cea694f1d9b3f5f5a93b1ced9c-dirty")
    'f4e23c7d552c, with changes'
    """
    text = as_text(value)
    return text[:12] + (", with changes" if text.endswith("-dirty") else "")


def environment_facts(start: Mapping[str, Any]) -> Facts:
    """Versions and machine."""
    versions = as_dict(start.get("versions"))
    named = [f"{name} {as_text(versions[name])}" for name in VERSIONS if versions.get(name)]
    rows = [("versions", ", ".join(named) or NOTHING)]
    for key in ("commit", "platform", "device", "processes", "threads", "workers", "precision", "started"):
        if start.get(key) is not None:
            rows.append((key, SHORTENED.get(key, as_text)(start[key])))
    return Facts("Where it ran", rows)


def moment(value: Any) -> str:
    """
    >>> moment("2026-11-16T16:00:05+00:00"), moment(None)
    ('2026-11-16 16:00 UTC', '–')
    """
    text = as_text(value, NOTHING)
    return f"{text[:10]} {text[11:16]} UTC" if text.endswith("+00:00") else text


SHORTENED: dict[str, Callable[[Any], str]] = {"started": moment, "commit": short_commit}


def settings_table(runs: Sequence[RunFolder]) -> Table:
    """Every setting of the first run; of others those that differ."""
    flat = [flatten(run.config) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    if len(runs) > 1:
        keys = [key for key in keys if len({one.get(key, NOTHING) for one in flat}) > 1]
    rows = [(key, *(one.get(key, NOTHING) for one in flat)) for key in keys]
    title = "All settings" if len(runs) == 1 else "Settings that differ"
    return Table(title, ("setting", *(run.label for run in runs)), rows, folded=True)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """
    >>> flatten({"a": {"b": 1}, "c": [2, 3], "d": None})
    {'a.b': '1', 'c': '2, 3', 'd': '–'}
    """
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            words = [str(item) for item in value] if isinstance(value, list) else []
            flat[f"{prefix}{key}"] = ", ".join(words) if words else as_text(value, NOTHING)
    return flat
