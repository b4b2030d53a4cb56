"""What a comparison drew, and what it was run with."""

from __future__ import annotations

from dataclasses import replace

from .blocks import Block, Command, Facts, Gallery, Table, Text
from .common import advice_blocks, environment_facts, moment, run_facts, settings_table
from .comparison import Comparison, Folders
from .numbers import NOTHING, duration, show
from .pictures import Album
from .read import as_dict, as_text, finite

MOST_GALLERIES = 6


def samples(comparison: Comparison, folders: Folders, album: Album) -> list[Block]:
    """A gallery for each of the first settings, and which others there are."""
    shown, others = comparison.settings[:MOST_GALLERIES], comparison.settings[MOST_GALLERIES:]
    galleries = [block for setting in shown for block in gallery(comparison, folders, album, setting)]
    if galleries and others:
        names = "; ".join(comparison.setting_name(setting) for setting in others)
        text = f"Not shown, to keep the page small: the samples of {names}, which lie in their folders."
        return [*galleries, Text([text], "note")]
    return galleries or [Text(["No samples were drawn yet."], "empty")]


def gallery(comparison: Comparison, folders: Folders, album: Album, setting: str) -> list[Block]:
    """The same seed for all methods, one picture for each; nothing where there are no pictures."""
    here = [(arm, run, folder) for arm, run, folder in folders if arm.setting == setting and folder.samples]
    seed = most_common_seed(here)
    chosen = [(arm.label, folder.samples[-1]) for arm, run, folder in here if run.seed == seed]
    pictures = [album.embed(sample.path, label, sample.name) for label, sample in chosen]
    shown = [picture for picture in pictures if picture is not None]
    note = f"Seed {show(seed)} for all: the same initial noise, so images in the same place can be compared."
    name = comparison.setting_name(setting)
    title = f"Drawn images, {name}" if name else "Drawn images"
    return [Gallery(title, shown, note, half=len(shown) <= 2)] if shown else []


def most_common_seed(folders: Folders) -> int | None:
    """The seed for which most methods have samples; the smallest of those."""
    seeds = [run.seed for _, run, _ in folders]
    return min(set(seeds), key=lambda seed: (-seeds.count(seed), seed is None, seed or 0), default=None)


def advice(comparison: Comparison, folders: Folders) -> list[Block]:
    """The comparison's own, or that of one of its runs."""
    if not comparison.kappa and not folders:
        return []
    own = next((folder.kappa for _, _, folder in folders if folder.kappa), {})
    run = folders[0][2].folder if folders else comparison.folder
    return advice_blocks(comparison.kappa or own, run, comparison.folder)


def setup(comparison: Comparison, folders: Folders) -> list[Block]:
    command, first = as_text(comparison.content.get("command")), folders[0][2] if folders else None
    blocks: list[Block] = [Command("To do it again", command)] if command else []
    blocks.append(comparison_facts(comparison))
    blocks += [replace(run_facts(first), title=f"Its first run: {first.label}")] if first else []
    blocks += [environment(comparison, folders), runs_table(comparison)]
    return [*blocks, *([settings_table([first])] if first else [])]


def comparison_facts(comparison: Comparison) -> Facts:
    content = comparison.content
    seconds = [value for arm in comparison.arms for run in arm.runs if (value := finite(run.content.get("seconds")))]
    rows = [
        ("recipe", comparison.recipe),
        ("description", as_text(content.get("description"), NOTHING)),
        ("seeds", ", ".join(map(str, comparison.seeds)) or NOTHING),
        ("steps", show(content.get("steps"))),
        ("baseline", comparison.baseline),
        ("created", moment(content.get("created"))),
        ("updated", moment(content.get("updated"))),
        ("time of all runs", duration(sum(seconds)) if seconds else NOTHING),
    ]
    return Facts("The comparison", rows)


def environment(comparison: Comparison, folders: Folders) -> Facts:
    """That of the comparison, and of its first run where it says nothing."""
    own = {key: value for key, value in as_dict(comparison.content.get("environment")).items() if value is not None}
    start = folders[0][2].starts[0] if folders and folders[0][2].starts else {}
    return environment_facts({**start, **own})


def runs_table(comparison: Comparison) -> Table:
    columns = ("run", "setting", "status", "step", "time", "final validation loss", f"final {comparison.fd_name}")
    rows = []
    for arm in comparison.arms:
        for run in arm.runs:
            step, loss, fd = (show(run.content.get(key)) for key in ("step", "final_loss", "final_fd"))
            time = duration(finite(run.content.get("seconds")))
            rows.append((run.name, arm.setting or NOTHING, run.status, step, time, loss, fd))
    return Table("Every run", columns, rows, folded=True)
