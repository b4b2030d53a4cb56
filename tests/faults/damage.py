"""Damaged files of runs, of what is made of them, of prepared data and comparisons: refused, or as if undamaged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from comparison_cases import lasting
from prepare_cases import tiny_job

from scalelong.cli.console import user_errors
from scalelong.data.prepare import prepare
from scalelong.runs import Run
from scalelong.utils.records import flatten

from .cases import Case, Outcome, compare, contents, differences, pick
from .children import End, command

LOCKS = {".lock", ".job"}


def flip_bits(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 8))):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def empty(data: bytes, chance: random.Random) -> bytes:
    return b""


def zero(data: bytes, chance: random.Random) -> bytes:
    """As a block that the disk has lost."""
    start = chance.randrange(len(data))
    stop = min(len(data), start + chance.randint(1, 512))
    return data[:start] + bytes(stop - start) + data[stop:]


def scramble(data: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(min(len(data), 4096))


def append(data: bytes, chance: random.Random) -> bytes:
    return data + (data[-chance.randint(1, len(data)) :] if chance.random() < 0.5 else chance.randbytes(20))


def swap(data: bytes, chance: random.Random) -> bytes:
    """Two parts of a file change their places."""
    place = chance.randrange(len(data))
    return data[place:] + data[:place]


DAMAGE = (flip_bits, flip_bits, flip_bits, cut, cut, empty, zero, scramble, append, swap)


def damage(folder: Path, chance: random.Random, *, most: int = 3) -> list[Path]:
    """Damage up to three files, each kind of them as likely as another; returns which."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in LOCKS]
    kinds = sorted({kind_of(path) for path in files})
    done = []
    for _ in range(chance.randint(1, most)):
        kind = chance.choice(kinds)
        path = chance.choice([path for path in files if kind_of(path) == kind])
        if chance.random() < 0.05:
            path.unlink(missing_ok=True)
        elif path.exists() and (data := path.read_bytes()):
            path.write_bytes(chance.choice(DAMAGE)(data, chance))
        done.append(path)
    return done


def kind_of(path: Path) -> str:
    """Files of one kind are damaged alike: a checkpoint has several of them, and a folder of images many."""
    return path.suffix if path.suffix in (".png", ".safetensors") and path.parent.name != "step-000006" else path.name


def judge(end: End, damaged: Sequence[Path], different: Callable[[], dict[str, str]]) -> Outcome:
    """Refused in a line, or as nothing had happened, or what differs was told by the name of its file."""
    tries = len(damaged)
    names = ", ".join(path.name for path in damaged)
    # Of a comparison only the runs that are damaged are refused.
    if end.refused or (end.code == 1 and "broken: " in end.err and not end.traced):
        return Outcome("refused", tries=tries)
    if end.code or end.traced:
        return Outcome("wrong", f"{names}: {end}", tries)
    silent = {part: how for part, how in different().items() if part not in end.err + end.out}
    return (
        Outcome("wrong", f"{names}: {silent} in silence: {end}", tries) if silent else Outcome("recovered", "", tries)
    )


def damage_run(case: Case) -> Outcome:
    """A run that was killed, then damaged, then resumed."""
    variant = pick(case, plain=3, gates=2, evaluated=1)
    run, whole = case.copy(case.shared.half(variant)), case.shared.whole(variant)
    before = (run / "config.yaml").read_bytes()
    damaged = damage(run, case.chance)
    changed = not (run / "config.yaml").exists() or (run / "config.yaml").read_bytes() != before
    end = case.call(command("train", "--out", run))
    return judge(end, damaged, lambda: unexplained(run, whole, damaged, recipe_changed=changed))


def unexplained(run: Path, whole: Path, damaged: Sequence[Path], *, recipe_changed: bool) -> dict[str, str]:
    """What differs beyond damage to what nothing is computed from, and beyond settings that may be changed."""
    different = differences(run, whole)
    for path in damaged:
        if path.suffix == ".png":  # Pictures are not looked at again.
            different.pop(path.name, None)
    if recipe_changed:
        ours, theirs = (flatten(settings(folder)) for folder in (run, whole))
        changed = {key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)}
        free = {"name", "description"} | {key for key in changed if key.startswith(("training.", "evaluation."))}
        if changed <= free:
            keep = set() if "training.steps" in changed else {"checkpoints"}
            different = {part: how for part, how in different.items() if part in keep}
    return different


def settings(run: Path) -> dict[str, object]:
    return Run(run).config().model_dump(mode="json")


def damage_finished(case: Case) -> Outcome:
    """A run that is finished, damaged, and then used."""
    drawn = case.chance.choice(("plain", "evaluated"))
    run = case.copy(case.shared.whole("plain" if case.shared.quick else drawn))
    damaged = damage(run, case.chance)
    use = case.chance.choice((["report"], ["sample", "-n", "2", "--steps", "1"], ["train", "--out"], ["export"]))
    if use == ["export"]:
        end = case.call(command("export", run, "--to", "uvit"))
    else:
        end = case.call(command(*use, run) if use != ["train", "--out"] else command("train", "--out", run))
    return judge(end, damaged, dict)


def damage_samples(case: Case) -> Outcome:
    """A folder of sampled images, damaged, and then sampled again."""
    whole = case.shared.sampled() / "run"
    run = case.copy(whole)
    damaged = damage(run / "samples", case.chance)
    end = case.call(command("sample", run, "-n", "20", "--batch", "8"))

    def different() -> dict[str, str]:
        ours, theirs = (contents(folder / "samples") for folder in (run, whole))
        # Grids are for the eye; nothing is computed from them.
        images = [name for name in theirs if Path(name).stem.isdigit()]
        return {name: "another picture" for name in images if ours.get(name) != theirs[name]}

    return judge(end, damaged, different)


def damage_prepared(case: Case) -> Outcome:
    """Prepared data, damaged, and then prepared again."""
    shared = case.shared
    what = case.chance.choice(("both", "images"))
    whole, root = shared.prepared(what) / "out", shared.folder / "encoders"
    folder = Path(shutil.copytree(whole, case.place / "out"))
    damaged = damage(folder, case.chance)
    end = case.call(refusing(lambda: prepare(tiny_job(root, folder, what=what))))
    ours, theirs = contents(folder), contents(whole)
    return judge(end, damaged, lambda: {name: "other bytes" for name in theirs if ours.get(name) != theirs[name]})


def refusing(function: Callable[[], object]) -> Callable[[], object]:
    """As a command would refuse."""

    def guarded() -> None:
        with user_errors():
            function()

    return guarded


def damage_comparison(case: Case) -> Outcome:
    """A comparison that is finished, damaged, and then asked for again or shown."""
    shared = case.shared
    whole = shared.compared() / "out"
    folder = Path(shutil.copytree(whole, case.place / "out"))
    damaged = damage(folder, case.chance)
    if case.chance.random() < 0.3:
        return judge(case.call(command("report", folder)), damaged, dict)
    end = case.call(lambda: compare(folder))
    return judge(end, damaged, lambda: results_differ(folder, whole))


def results_differ(found: Path, whole: Path) -> dict[str, str]:
    ours, theirs = (lasting(json.loads((folder / "results.json").read_text())) for folder in (found, whole))
    return {} if ours == theirs else {"results.json": "other results"}
