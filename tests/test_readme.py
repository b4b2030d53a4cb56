"""Every command and every line of Python in the README works; what takes a GPU, a download or minutes is a dry run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tomllib
from command_line import run, sets
from run_cases import tiny

import scalelong
from scalelong.models import UViT
from scalelong.training import train

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

LONGEST = 150


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands(program: str) -> list[list[str]]:
    """The commands of a program, without comments and without a launcher in front."""
    lines = [line.partition("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    lines = [re.sub(r"^torchrun .*-m (?=scalelong)", "", line) for line in lines]
    return [shlex.split(line) for line in lines if line.split(" ")[0] == program]


# What makes a command quick, besides those that are only planned.
DRY = {"train": ["--dry-run"], "compare": ["--dry-run"], "edge": ["--dry-run"], "prepare": ["--dry-run"]}
SMALLER = {"sample": ["--steps", "2"], "evaluate": ["--steps", "2"], "theory": ["--out", "theory"]}
COUNTS = {"-n": "4", "--images": "32"}


def shortened(arguments: list[str]) -> list[str]:
    """A command as one can test it: with fewer images and steps, or as a dry run."""
    command, *rest = arguments
    for option, count in COUNTS.items():
        if option in rest:
            rest[rest.index(option) + 1] = count
    return [command, *rest, *DRY.get(command, []), *SMALLER.get(command, [])]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run and the comparison that the README's commands speak of, tiny ones."""
    folder = tmp_path_factory.mktemp("readme")
    train(tiny("scaling.method=ls", "sampling.sampler=ddim", "training.steps=2"), folder / "runs" / "digits-ls")
    short = ("training.steps=5", "training.validate_every=1", "training.batch_size=8", "data.validation_count=10")
    small = ("model.embed_dim=16", "model.num_heads=2", "training.sample_every=null")
    command = ["compare", "digits", "--methods", "none,cs", "--seeds", "2", *sets(*short, *small)]
    result = run(*command, "--out", folder / "runs" / "digits-comparison")
    assert result.exit_code == 0, result.output
    return folder


SLOW = {"theory", "evaluate"}
SCALELONG = [
    pytest.param(arguments[1:], id=" ".join(arguments[1:]), marks=[pytest.mark.slow] * (arguments[1] in SLOW))
    for arguments in commands("scalelong")
]


@pytest.mark.parametrize("arguments", SCALELONG)
def test_a_command_of_the_readme_works(
    arguments: list[str], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A dry run is of a run that is not there yet, the other commands are of those that are.
    is_planned = arguments[0] in DRY and "--out" not in arguments
    monkeypatch.chdir(tmp_path if is_planned else place)
    result = run(*shortened(arguments))
    assert result.exit_code == 0, result.output


def test_the_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    asked = {arguments[1] for arguments in commands("make")}
    assert asked and asked <= targets


def test_the_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [re.fullmatch(r"scalelong(?:\[(\w+)\])?", arguments[2]) for arguments in commands("pip")]
    assert all(asked)
    assert {match[1] for match in asked if match and match[1]} <= project["optional-dependencies"].keys()


def test_the_lines_of_python_work() -> None:
    lines = [line for block in blocks("python") for line in block.splitlines() if line.strip()]
    assert sum("scale_skips(" in line for line in lines) >= 3
    # A U-ViT has no norm after the join: scaling behind one is tested where there is one.
    for line in (line for line in lines if "after-norm" not in line):
        model = scalelong.scale_skips(UViT(8, embed_dim=16, depth=4, num_heads=2), "cs", kappa=0.7)
        exec(line, {"model": model, "scalelong": scalelong, "scale_skips": scalelong.scale_skips})


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) < LONGEST
    links = re.findall(r"\]\(((?!https?:)[^)#]+)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]
