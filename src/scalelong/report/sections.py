"""Sections that the pages of runs and of comparisons share, and pictures small enough to lie inside the page."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .blocks import Block, Chart, Gallery, Metadata, Picture, Section, Series, Table, Text, View
from .numbers import NOTHING, duration, show
from .runs import Environment, Kappa, Run, short

if TYPE_CHECKING:
    from PIL.Image import Image

PAPER_BAND = (0.5, 0.95)
"""The range of κ that the paper recommends for CS."""

Grid = tuple[Path, str, str]
"""A picture's file, label and detail."""

VERSIONS = ("scalelong", "python", "torch", "diffusers", "accelerate", "datasets", "numpy")

LONGEST_SIDE, LARGEST_PNG = 560, 150_000

BUDGET = 2_500_000
"""Bytes of all pictures of a page, whatever it is about."""

TINY = 300
"""A grid with fewer pixels than this is shown larger, with hard edges."""


def coefficient_chart(views: Sequence[View], kappa: Kappa | None, note: str, source: str) -> Chart:
    """Behind the coefficients: the range of κ^(i−1) for the κ of the advice, or for those of the paper."""
    low, high = kappa.band if kappa else (None, None)
    where = "the band measured for this recipe"
    if low is None or high is None:
        (low, high), where = PAPER_BAND, "of the paper"
    count = max(int(x) for view in views for one in view.series for x, _ in one.points)
    band = [(float(index), low ** (index - 1), high ** (index - 1)) for index in range(1, count + 1)]
    area = Series(f"CS with κ from {show(low, 3)} to {show(high, 3)}, {where}", 0, band=band)
    views = [replace(view, area=area) for view in views]
    title, x = "Coefficient of each skip (Fig. 7)", "skip, 1 = outermost"
    return Chart(title, x, "κᵢ", views, source, linear=True, key="coef", note=note)


def warnings_section(events: Sequence[tuple[str, str]], warnings: Sequence[str]) -> Section:
    """What happened in the runs, and what was wrong with the files."""
    blocks: list[Block] = []
    if warnings:
        blocks.append(Text("Please note", "warning", list(dict.fromkeys(warnings))))
    if events:
        blocks.append(Table("What happened", ("run", "event"), events, folded=len(events) > 8))
    nothing = "Nothing unusual: no spikes, skipped steps, rollbacks or failed runs, and all files could be read."
    count = len(set(warnings)) + len(events)
    title = f"Warnings ({count})" if count else "Warnings"
    return Section("warnings", title, blocks or [Text(nothing, "empty")])


def advice_blocks(kappa: Kappa | None, run: Path, target: Path) -> Sequence[Block]:
    """The advice of kappa.json, or the command that makes it for the recipe of a run."""
    if kappa is None:
        text = "No advice was measured here. It takes seconds, from the recipe's own data, schedule and network:"
        recipe, file = (shlex.quote(str(path)) for path in (run / "config.yaml", target / "kappa.json"))
        return [Text(text, "empty"), Text("To measure it", "command", [f"scalelong kappa {recipe} --json > {file}"])]
    low, high = (show(end, 3) for end in kappa.band)
    where = ", scaled after the norm" if kappa.where == "after-norm" else ""
    headline = f"κ = {show(kappa.kappa)} for CS; the band that matches the target's size is {low} to {high}{where}."
    rows = [
        ("long skips N", show(kappa.num_skips)),
        ("Σκᵢ² aimed at", " to ".join(show(end, 3) for end in kappa.sum_of_squares) or NOTHING),
        ("block gain M₀", show(kappa.block_gain, 3)),
        ("images measured", show(kappa.images)),
    ]
    return [Text(headline, "list", kappa.reasons), Metadata("Measured", rows)]


def run_metadata(run: Run, title: str = "The run") -> Metadata:
    """What one would ask first about a run."""
    config, size = run.config, show(run.config.image_size)
    model = {key.removeprefix("model."): value for key, value in config.settings.items() if key.startswith("model.")}
    plain = [f"{key} {show(value)}" for key, value in model.items() if type(value) in (int, float, str)]
    rows = [
        ("recipe", config.name),
        ("description", config.description or NOTHING),
        ("data", f"{show(config.source)}, {size}×{size} pixels, channels: {show(config.channels)}"),
        ("network", ", ".join(plain) or NOTHING),
        ("scaling", run.method),
        ("steps × batch", f"{show(config.steps)} × {show(config.batch_size)}"),
        ("learning rate", show(config.lr)),
        ("seed", show(config.seed)),
        ("time so far", duration(run.seconds)),
    ]
    return Metadata(title, rows)


def environment_metadata(environment: Environment) -> Metadata:
    """Versions and machine."""
    versions, commit, started = environment.versions, environment.commit, environment.started
    machine = ("platform", "device", "processes", "threads", "workers", "precision")
    rows = [
        ("versions", ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions) or NOTHING),
        ("commit", commit and commit[:12] + ", with changes" * commit.endswith("-dirty")),
        *((name, getattr(environment, name)) for name in machine),
        ("started", started and moment(started)),
    ]
    return Metadata("Where it ran", [(name, show(value)) for name, value in rows if value is not None])


def moment(value: str | None) -> str:
    """
    >>> moment("2026-11-16T16:00:05+00:00"), moment(None)
    ('2026-11-16 16:00 UTC', '–')
    """
    return f"{value[:10]} {value[11:16]} UTC" if value and value.endswith("+00:00") else value or NOTHING


def settings_table(runs: Sequence[Run]) -> Table:
    """Every setting of the first run; of others those that differ."""
    columns = [{key: setting_text(value) for key, value in run.config.settings.items()} for run in runs]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [(key, *(column.get(key, NOTHING) for column in columns)) for key in keys]
    if len(runs) > 1:
        rows = [row for row in rows if len(set(row[1:])) > 1]
    title = "All settings" if len(runs) == 1 else "Settings that differ"
    return Table(title, ("setting", *(run.label for run in runs)), rows, folded=True)


def setting_text(value: Any) -> str:
    items = value if isinstance(value, list) else [] if value is None else [value]
    return ", ".join(map(str, items)) or NOTHING


# Pictures


@dataclass
class Album:
    """Embeds pictures until the bytes are spent, which all parts of a page share, and warns of those left out."""

    left: int

    def gallery(self, title: str, note: str, grids: Sequence[Grid], warnings: list[str]) -> list[Gallery]:
        """The pictures that can be shown; nothing where there are none."""
        pictures = [self.embed(path, label, detail, warnings) for path, label, detail in grids]
        shown = [picture for picture in pictures if picture is not None]
        return [Gallery(title, shown, note=note)] if shown else []

    def embed(self, path: Path, label: str, detail: str, warnings: list[str]) -> Picture | None:
        """The picture of a file as part of the page; None, with a warning, where that cannot be."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as opened:
                picture = shrink(opened.convert("L" if opened.mode in ("1", "L") else "RGB"))
        except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            warnings.append(f"{short(path)} could not be shown ({type(error).__name__}).")
            return None
        kind, data = encode(picture)
        if len(data) > self.left:
            warnings.append(f"{short(path)} and later pictures are left out, to keep the page below 5 MB.")
            return None
        self.left -= len(data)
        address = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        return Picture(label, detail, address, *picture.size, pixelated=max(picture.size) < TINY)


def shrink(picture: Image) -> Image:
    """Without an enlargement by a whole factor, which the browser does as well, and not larger than a column shows."""
    from PIL import Image

    nearest = Image.Resampling.NEAREST
    for factor in range(32, 1, -1):
        if picture.width % factor or picture.height % factor:
            continue
        small = picture.resize((picture.width // factor, picture.height // factor), nearest)
        if small.resize(picture.size, nearest).tobytes() == picture.tobytes():
            picture = small
            break
    # Leaves smaller ones as they are.
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    return picture


def encode(picture: Image) -> tuple[str, bytes]:
    """PNG, or JPEG where that would be much larger, as for many photographs."""
    png, jpeg = io.BytesIO(), io.BytesIO()
    picture.save(png, format="PNG", optimize=True)
    if png.tell() <= LARGEST_PNG:
        return "png", png.getvalue()
    picture.save(jpeg, format="JPEG", quality=88)
    return "jpeg", jpeg.getvalue()
