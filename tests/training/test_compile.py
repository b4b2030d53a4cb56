"""Compiled training and sampling: the same numbers and names, and EMA weights that compiled code sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import run
from PIL import Image
from run_cases import final_tensors, lasting_metrics, losses, run_tiny
from torch._dynamo.utils import counters

from scalelong.runs import Run
from scalelong.sampling import sample_run
from scalelong.sampling.images import images_in, read_image

EVALUATED = ("training.validate_every=4", "training.sample_every=8", "optim.warmup_steps=1", "data.validation_count=8")

# Sums in another order, over a few steps.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No compiled code of other tests, and none left for them."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and guard as always, but run the traced operations as they are: C++ takes a minute for each graph."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda code, **options: compiled(code, backend="aot_eager", **options))


def run_both(folder: Path, *overrides: str) -> tuple[Path, Path]:
    """The same recipe as it is and compiled."""
    plain, compiled = folder / "plain", folder / "compiled"
    run_tiny(plain, *overrides)
    assert not counters["frames"]
    run_tiny(compiled, *overrides, "training.compile=true")
    assert counters["frames"]["ok"] > 0
    return plain, compiled


def pixels(out: Path, step: int = 8) -> np.ndarray:
    return np.asarray(Image.open(Run(out).samples / f"step-{step:06d}.png")).astype(int)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cs", "ls"])
def test_compiled_training_has_the_losses_of_plain_training(method: str, tmp_path: Path) -> None:
    plain, compiled = run_both(tmp_path, f"scaling.method={method}", "training.steps=4")
    assert losses(compiled) == pytest.approx(losses(plain), rel=TOLERANCE)
    assert len(set(losses(plain))) == 4


@pytest.mark.usefixtures("no_code_generation")
def test_compiled_evaluation_and_samples_use_the_averaged_weights(tmp_path: Path) -> None:
    plain, compiled = run_both(tmp_path, "scaling.method=ls", *EVALUATED)
    expected = [line for line in lasting_metrics(plain) if "validation_loss" in line]
    found = [line for line in lasting_metrics(compiled) if "validation_loss" in line]
    assert len(found) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
        assert abs(ours["validation_loss"] / ours["validation_loss_ema"] - 1) > 100 * TOLERANCE
    # One level of 256 for rounding.
    assert abs(pixels(compiled) - pixels(plain)).max() <= 1


@pytest.mark.usefixtures("no_code_generation")
def test_a_compiled_run_goes_on_without_compiling(tmp_path: Path) -> None:
    plain, compiled = run_both(tmp_path)
    run_tiny(tmp_path / "after", resume=compiled / "checkpoints" / "step-000003")
    assert losses(tmp_path / "after") == pytest.approx(losses(plain)[3:], rel=TOLERANCE)
    assert final_tensors(compiled).keys() == final_tensors(plain).keys()


# Sampling


def drawn(folder: Path) -> torch.Tensor:
    """Shape: (N, C, H, W)."""
    return torch.stack([read_image(path) for path in sorted(images_in(folder))]).int()


@pytest.mark.usefixtures("no_code_generation")
def test_compiled_samples_are_those_of_the_plain_network_in_a_folder_of_their_own(tmp_path: Path) -> None:
    run_tiny(tmp_path)
    plain = sample_run(tmp_path, 6, steps=3, batch=4)
    assert not counters["frames"]
    compiled = sample_run(tmp_path, 6, steps=3, batch=4, compile=True)
    # The blocks have four and two images, and code is made for each by itself.
    assert counters["stats"]["unique_graphs"] == 2
    assert compiled.name == f"{plain.name}-compiled"
    assert (drawn(compiled) - drawn(plain)).abs().max() <= 1
    assert len(drawn(compiled)) == 6


@pytest.mark.parametrize("command", ["train", "sample", "evaluate"])
def test_without_a_compiler_one_line_says_so_and_nothing_is_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tiny(tmp_path / "run")
    there = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    options = {
        "train": ["digits", "--set", "training.compile=true", "--out", tmp_path / "other"],
        "sample": [tmp_path / "run", "--compile"],
        "evaluate": [tmp_path / "run", "--compile"],
    }
    result = run(command, *options[command])
    assert result.exit_code == 2
    assert "torch needs no-such-compiler" in result.stderr and result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == there
