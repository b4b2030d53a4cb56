"""The command `scalelong prepare`: what it prints and writes, and how it fails."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_fails, run
from prepare_cases import contents

import scalelong
from scalelong.cli import console
from scalelong.config import load_recipe
from scalelong.data import load_images
from scalelong.data.encoders import TextEncoder
from scalelong.data.prepare import Job
from scalelong.data.prepared import open_prepared, prepared_folder
from scalelong.utils.block_folder import INDEX

MakeJob = Callable[[str], Job]

RECIPE = """
name: tiny
data: {{source: {root}/pictures.parquet, image_size: 16, caption_column: captions, validation_count: 6}}
text: {{encoder: {root}/bert, max_length: 8, width: 16, drop: 0.1}}
model: {{kind: uvit, img_size: 16, patch_size: 8, embed_dim: 16, depth: 2, num_heads: 2}}
optim: {{lr: 1e-3}}
training: {{steps: 2, batch_size: 4}}
"""


@pytest.fixture
def recipe(tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(root=tiny_root))
    return tmp_path / "tiny.yaml"


def test_the_command_fills_the_folder_of_the_recipe_and_says_what_comes_next(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    result = run("prepare", recipe)
    assert result.exit_code == 0, result.output
    config = load_recipe(recipe)
    folder = prepared_folder(config.name, config.data, config.text, config.latents)
    assert re.fullmatch(r"prepared/tiny-[0-9a-f]{8}", str(folder))
    assert result.stderr.splitlines()[-1] == "24 of 24 rows"
    (last,) = result.stdout.splitlines()
    assert last.startswith(f"finished: {folder}, 18 rows to train on and 6 for validation, ")
    assert last.endswith(f"To train: scalelong train {recipe}")
    images = load_images(config.data)
    prepared = open_prepared(Job(config.data, config.text, None, folder), images=(images.train, images.validation))
    assert len(prepared.train) == 18


def test_another_folder_is_named_to_the_training(recipe: Path) -> None:
    result = run("prepare", recipe, "--out", "elsewhere")
    assert result.stdout.endswith(f"To train: scalelong train {recipe} --set data.prepared=elsewhere\n")
    config = load_recipe(recipe, ["data.prepared=elsewhere"])
    assert prepared_folder(config.name, config.data, config.text, config.latents) == Path("elsewhere")
    assert (Path("elsewhere") / INDEX).is_file()


def test_the_training_command_repeats_the_settings_and_so_finds_the_folder(recipe: Path) -> None:
    settings = ["data.validation_count=4", "data.caption_column='captions'"]
    result = run("prepare", recipe, "--set", settings[0], "--set", settings[1])
    *_, command = result.stdout.strip().partition("To train: ")
    assert shlex.split(command) == ["scalelong", "train", str(recipe), "--set", settings[0], "--set", settings[1]]
    config = load_recipe(recipe, settings)
    assert (prepared_folder(config.name, config.data, config.text, config.latents) / INDEX).is_file()


def test_the_folder_of_a_recipe_follows_what_changes_its_contents(made: MakeJob) -> None:
    job = made("both")

    def place(**changes: Any) -> Path:
        return prepared_folder("name", job.data.model_copy(update=changes), job.text, job.latents)

    assert place(flip=True) == place(workers=1) == place()
    assert len({place(), place(image_size=8), place(validation_count=7), place(source="elsewhere")}) == 4
    assert place(config="other") != place()


def test_the_command_fails_in_one_line(recipe: Path) -> None:
    result = run("prepare", recipe, "--set", "text.encoder=./nowhere")
    assert_fails(result, r"text.encoder: there is no folder './nowhere' \(looked for .*\)")


def test_a_stopped_command_says_that_it_goes_on(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TextEncoder, "encode", stop)
    result = run("prepare", recipe)
    assert result.exit_code == 130
    assert result.stderr == "stopped: what is finished is kept, and the same command resumes\n"


def test_a_recipe_of_images_fills_the_image_cache(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALELONG_CACHE", "cache")
    result = run("prepare", "digits", "--set", "data.validation_count=97")
    assert re.match(r"finished: cache/images/sklearn-digits-[0-9a-f]{8}, 1700 rows to train on and 97", result.stdout)
    refused = run("prepare", "digits", "--out", "elsewhere")
    assert_fails(refused, "--out: this recipe's images go to the image cache")


@pytest.mark.slow
def test_torchrun_prepares_and_only_its_first_process_speaks(recipe: Path, tmp_path: Path) -> None:
    run("prepare", recipe, "--out", "alone")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "scalelong"]
    command = [sys.executable, *launcher, "prepare", str(recipe), "--out", "together"]
    ours = {"PYTHONPATH": str(Path(scalelong.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | ours)
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("finished") for line in done.stdout.splitlines()) == 1
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")
