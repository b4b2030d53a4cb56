"""The options of a sampler: what they are called, that they reach it, and that folders tell them apart."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from run_cases import run_tiny
from typer.testing import CliRunner

from scalelong.cli.app import app
from scalelong.config import load_recipe
from scalelong.evaluation.results import describe_sampler
from scalelong.sampling import sample_run
from scalelong.sampling.sample_run import SampleRequest, describe_samples, title, with_sampling

OPTIONS: dict[str, dict[str, Any]] = {
    "linspace": {"timestep_spacing": "linspace"},
    "large-variance": {"variance": "large"},
    "unclipped": {"clip": False},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    run_tiny(folder)
    return folder


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="scalelong")


def images(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("0*.png")}


@pytest.mark.parametrize(("detail", "given"), OPTIONS.items())
def test_an_option_changes_the_images_and_is_in_the_name_of_their_folder(
    detail: str, given: dict[str, Any], run: Path
) -> None:
    plain = sample_run(run, 4, steps=5, batch=4)
    changed = sample_run(run, 4, steps=5, batch=4, **given)
    assert changed.name == f"{plain.name}-{detail}"
    assert images(changed) != images(plain)
    (name, value), *_ = given.items()
    flag = "--no-clip" if value is False else f"--{name.replace('_', '-')}={value}"
    assert str(changed) in command("sample", run, "-n", 4, "--steps", 5, "--batch", 4, flag).stdout


def test_asking_for_what_is_usual_gives_the_folder_of_not_asking(run: Path) -> None:
    usual = sample_run(run, 4, steps=5, batch=4, timestep_spacing="quadratic", variance="small", clip=True)
    assert usual == sample_run(run, 4, steps=5, batch=4)


def test_the_variance_is_named_only_where_one_is_drawn_and_clipping_where_it_is_unusual() -> None:
    digits, latents = load_recipe("digits"), load_recipe("coco-uvit-s2")
    names = {
        "ddpm, 200 steps, large-variance": with_sampling(digits, variance="large"),
        "ddim, 200 steps": with_sampling(digits, sampler="ddim", variance="large"),
        "dpm-solver++-3, 50 steps, linspace, guidance 2": with_sampling(latents, clip=False),
        "dpm-solver++-3, 50 steps, linspace, clipped, guidance 2": with_sampling(latents, clip=True),
    }
    assert [describe_sampler(config) for config in names.values()] == list(names)


@pytest.mark.parametrize("steps", [1001, 2000])
def test_more_steps_than_the_schedule_has_are_refused_before_a_folder_is_made(run: Path, steps: int) -> None:
    message = f"steps must be between 1 and 1000, the schedule's number of times, got {steps}"
    with pytest.raises(ValueError, match=message):
        sample_run(run, 4, steps=steps)
    for name in ("sample", "evaluate"):
        result = command(name, run, "--steps", steps)
        assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")
    assert not list((run / "samples").glob(f"*{steps}-steps*"))


def test_a_recipe_with_more_steps_than_its_schedule_takes_all_and_says_so(run: Path) -> None:
    config = load_recipe("digits", ["diffusion.steps=20"])
    assert config.sampling.steps == 200 and config.sampling_steps == 20
    assert "-ddpm-20-steps" in title(config, SampleRequest(), 8, "ema", 0)


def test_what_is_usual_is_described_as_before_there_were_options(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("scalelong.sampling.sample_run")  # The package's name for it is the function's.
    monkeypatch.setattr(module, "weights_digest", lambda checkpoint, weights: "digest")
    checkpoint: Any = type("Checkpoint", (), {"step": 8})()
    described = describe_samples(load_recipe("digits"), SampleRequest(), checkpoint, "ema", 0)
    assert list(described) == ["weights", "step", "sha256", "seed", "sampler", "steps", "guidance", "class", "prompt"]


@pytest.mark.parametrize("flag", ["--timestep-spacing", "--variance"])
def test_an_unknown_value_of_an_option_fails_with_those_that_there_are(run: Path, flag: str) -> None:
    result = command("sample", run, flag, "even")
    assert result.exit_code == 2
    assert flag in result.stderr and ("quadratic" in result.stderr or "small" in result.stderr)
