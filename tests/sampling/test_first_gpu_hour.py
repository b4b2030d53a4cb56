"""docs/first-gpu-hour.md: its commands exist, its recipes resolve, and what it does with a public checkpoint works."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from run_cases import tiny
from typer.testing import CliRunner

from scalelong.cli.app import app
from scalelong.config import build_model, load_recipe
from scalelong.runs.model import choose_checkpoint, load_network
from scalelong.runs.run_dir import Run
from scalelong.sampling import sample_run

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import public_uvit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "first-gpu-hour.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    return [shlex.split(command) for block in blocks for command in block.strip().split("; ")]


OURS = [words[words.index("scalelong") + 1 :] for words in commands() if "scalelong" in words]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), prog_name="scalelong")
    assert result.exit_code == 0, result.output
    return result.output


def test_there_are_five_commands() -> None:
    assert len(re.findall(r"^## \d\. ", PAGE, flags=re.MULTILINE)) == PAGE.count("```sh") == 5


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_every_option_of_a_command_exists(words: list[str]) -> None:
    known = run(words[0], "--help")
    assert all(re.search(rf"(?<!\S){word}(?!\S)", known) for word in words if word.startswith("-"))


@pytest.mark.parametrize("words", [words for words in OURS if words[:2] == ["train", "cifar10-uvit-s2"]])
def test_the_training_commands_resolve(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "steps 0 to 600" in run(*words, "--dry-run")
    assert not list(tmp_path.iterdir())


def test_a_public_checkpoint_becomes_a_run_that_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("scaling.method=none")
    network = build_model(tiny("scaling.method=none", "seed=3"))
    torch.save(network.state_dict(), tmp_path / "public.pth")
    folder = public_uvit.make_run(tmp_path / "public.pth", config, tmp_path / "run")
    made = load_network(config, choose_checkpoint(Run(folder)), "ema")
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in made.state_dict().items())
    assert (sample_run(folder, 2, steps=2) / "000001.png").is_file()
    with pytest.raises(SystemExit, match="is a run already"):
        public_uvit.make_run(tmp_path / "public.pth", config, folder)


def test_the_script_takes_the_words_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = [words for words in commands() if words[0] == "python"]
    assert (ROOT / words[1]).is_file() and load_recipe(words[3]).labels is not None
    seen = []
    monkeypatch.setattr(public_uvit, "make_run", lambda *given: seen.append(given))
    monkeypatch.setattr(sys, "argv", words[1:])
    public_uvit.main()
    (weights, config, folder), *_ = seen
    assert (str(weights), config.scaling.method, str(folder)) == (words[2], "none", words[4])


def test_networks_that_are_fed_other_times_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="fed times from 1 to 1000"):
        public_uvit.make_run(tmp_path / "coco.pth", load_recipe("coco-uvit-s2"), tmp_path / "run")
