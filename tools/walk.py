"""How far one walks through the code to follow a command: the files of ours that run, in the order of their first call.

python tools/walk.py                      # all commands on a tiny run: files, packages, changes of package
python tools/walk.py train --files        # one command, with its files in order

A file is opened when one of its functions is called; importing it does not count, nor do its processes' imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "scalelong"

# Loaded by every Python process that the command starts. Each notes the files in the order of their first call.
RECORDER = """
import atexit, importlib, json, os, sys, threading
for name in os.environ["WALK_PRELOADED"].split():  # To import them while calls are noted takes much longer.
    importlib.import_module(name)
source, folder = os.environ["WALK_SOURCE"] + os.sep, os.environ["WALK_FOLDER"]
opened, seen, owner = [], set(), os.getpid()

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code not in seen:
        seen.add(code)
        name = code.co_filename
        if name.startswith(source) and code.co_name != "<module>" and not is_import(frame):
            name = name[len(source):]
            if name not in opened:
                opened.append(name)

def is_import(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(source):
            return not frame.f_code.co_filename.endswith("__main__.py")
        frame = frame.f_back
    return False

def write():
    if opened:
        with open(os.path.join(folder, f"{os.getpid()}.json"), "w") as file:
            json.dump(opened, file)

atexit.register(write)
os.register_at_fork(after_in_child=opened.clear)
import multiprocessing.util
multiprocessing.util.Finalize(None, write, exitpriority=0)
multiprocessing.util.register_after_fork(write, lambda _: multiprocessing.util.Finalize(None, write, exitpriority=0))
threading.setprofile(note)
sys.setprofile(note)
"""

PRELOADED = "torch torch._dynamo diffusers sklearn.datasets pydantic yaml typer rich.progress scipy.stats PIL.Image"

TINY = (
    *("--set", "training.steps=4", "--set", "training.batch_size=8", "--set", "training.checkpoint_every=2"),
    *("--set", "training.log_every=2", "--set", "sampling.steps=2"),
)
NO_GRID = ("--set", "training.sample_every=null")
PLAIN = (*NO_GRID, "--set", "training.validate_every=2")
# A plain run trains, validates and saves; scaled skips and grids of samples add their files to it.
COMMANDS = {
    "train": ("train", "digits", "--out", "plain", *TINY, *PLAIN, "--set", "scaling.method=none"),
    "train, with CS": ("train", "digits", "--out", "scaled", *TINY, *PLAIN),
    "train, with CS and grids": ("train", "digits", "--out", "run", *TINY, "--set", "training.sample_every=4"),
    "sample": ("sample", "run", "-n", "4"),
    "evaluate": ("evaluate", "run", "--images", "64"),
    "compare": (
        *("compare", "digits", "--methods", "none,cs", "--seeds", "2", "--out", "comparison"),
        *(*TINY, *NO_GRID, "--steps", "8"),
    ),
    "report": ("report", "comparison"),
}


def follow(arguments: tuple[str, ...], place: Path) -> list[str]:
    """The files that a command opens, those of its first process first."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(RECORDER)
        path = os.pathsep.join([folder, str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])
        places = {"WALK_SOURCE": str(SOURCE), "WALK_FOLDER": folder, "WALK_PRELOADED": PRELOADED}
        places |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "scalelong", *arguments]
        done = subprocess.run(command, cwd=place, env={**os.environ, **places}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        records = sorted(Path(folder).glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        return list(dict.fromkeys(name for record in records for name in json.loads(record.read_text())))


@dataclass(frozen=True)
class Walk:
    """The files that a command opens, in order."""

    files: list[str]

    @property
    def packages(self) -> int:
        return len({package(file) for file in self.files})

    @property
    def changes(self) -> int:
        """How often the next file lies in another package."""
        return sum(package(before) != package(after) for before, after in pairwise(self.files))

    def as_text(self) -> str:
        """The files by package, one line for each stay in it."""
        stays = groupby(self.files, package)
        return "\n".join(f"- `{name}`: {', '.join(Path(file).stem for file in files)}" for name, files in stays)


def package(name: str) -> str:
    return name.rpartition("/")[0] or "."


def follow_all(wanted: str | None = None) -> dict[str, Walk]:
    """Every command's walk, or that of one; each works on what those before it have made."""
    walks = {}
    with tempfile.TemporaryDirectory() as place:
        for name, arguments in COMMANDS.items():
            walks[name] = Walk(follow(arguments, Path(place)))
            if name == wanted:
                return {name: walks[name]}
    return walks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=COMMANDS, help="all of them, if not given")
    parser.add_argument("--files", action="store_true", help="list the files in order")
    options = parser.parse_args()
    print(f"{'command':30} {'files':>5} {'packages':>8} {'changes':>7}   of {len(list(SOURCE.rglob('*.py')))} files")
    for name, found in follow_all(options.command).items():
        print(f"{name:30} {len(found.files):5} {found.packages:8} {found.changes:7}")
        if options.files:
            print(found.as_text())


if __name__ == "__main__":
    main()
