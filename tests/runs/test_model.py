"""Which checkpoint of a run is meant, and how the commands that take it name what they write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import run
from run_cases import run_tiny

from scalelong.runs import CheckpointError, Run, RunError
from scalelong.runs.model import choose_checkpoint


def run_with(folder: Path, *metrics: float | None) -> Run:
    """A run with a checkpoint for each validation loss, from step 1 on."""
    run = Run(folder)
    for step, metric in enumerate(metrics, start=1):
        run.checkpoints(keep_last=len(metrics)).save(step, {"model": {"weight": torch.zeros(1)}}, {}, metric)
    return run


@pytest.mark.parametrize(("which", "step"), [("last", 3), ("best", 2), ("1", 1), (2, 2)])
def test_a_checkpoint_is_chosen_by_its_age_its_validation_loss_or_its_step(
    which: str | int, step: int, tmp_path: Path
) -> None:
    assert choose_checkpoint(run_with(tmp_path, 0.5, 0.1, None), which).step == step


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        (
            "best",
            RunError,
            "has no checkpoint with a validation loss, by which the best is known: use --checkpoint last",
        ),
        ("newest", ValueError, "--checkpoint is best, last, or the number of a step, not 'newest'"),
        ("7", CheckpointError, "there is no checkpoint .*step-000007. Steps in .*: 1, 2"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_an_error_that_says_what_is(
    which: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        choose_checkpoint(run_with(tmp_path, None, None), which)


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no checkpoint yet"):
        choose_checkpoint(Run(tmp_path))


def test_what_is_sampled_and_exported_is_named_after_the_step_of_the_chosen_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_tiny(folder, "model.patch_size=2")
    sampled = run("sample", folder, "-n", 2, "--steps", 2, "--checkpoint", 3)
    assert sampled.exit_code == 0, sampled.output
    assert [path.name for path in (folder / "samples").iterdir() if path.is_dir()] == [
        "step-000003-ema-seed-0-ddpm-2-steps"
    ]
    exported = run("export", folder, "--to", "uvit", "--checkpoint", 6)
    assert exported.stdout.splitlines()[0] == f"written: {folder / 'uvit-step-000006'}"
    refused = run("sample", folder, "--checkpoint", "best")
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
