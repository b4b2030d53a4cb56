"""Runs in processes of their own: killed at random moments, and several that train together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import sets
from run_cases import TINY, assert_same_run, final_tensors, free_port, in_processes, lasting_metrics, losses
from safetensors.torch import load_file

from scalelong.runs import read_metrics

EVALUATED = ["training.validate_every=4", "optim.warmup_steps=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recipe by one process and by two, each without interruption (`1`, `2`) and with kills (`1k`, `2k`).

    `poisoned` is a run of two in which the second process meets a NaN in its part of the fourth batch.
    """
    folder = tmp_path_factory.mktemp("runs")
    plans = [{"out": folder / f"{count}", "processes": count, "overrides": EVALUATED} for count in (1, 2)]
    killed = [{**plan, "out": f"{plan['out']}k", "kills": 2, "seed": plan["processes"]} for plan in plans]
    plans[1]["averages"] = True
    in_processes(*plans, *killed, {"out": folder / "poisoned", "processes": 2, "poisoned_rank": 1})
    return folder


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_killed_again_and_again_ends_as_one_never_killed(processes: int, runs: Path) -> None:
    assert_same_run(runs / f"{processes}k", runs / f"{processes}")


def test_two_processes_have_the_losses_of_one(runs: Path) -> None:
    one, two = lasting_metrics(runs / "1"), lasting_metrics(runs / "2")
    assert [line.keys() for line in one] == [line.keys() for line in two]
    for alone, together in zip(one, two, strict=True):
        # 1e-5: sums in another order, over eight steps.
        assert together == pytest.approx(alone, rel=1e-5)
    assert len(set(losses(runs / "1"))) == 8


def test_averaged_weights_are_the_same_in_every_process(runs: Path) -> None:
    saved = {name: tensor for name, tensor in final_tensors(runs / "2").items() if name.startswith("ema/")}
    assert saved
    for rank in range(2):
        own = load_file(runs / "2" / f"averages-{rank}.safetensors")
        assert {f"ema/{name}" for name in own} == saved.keys()
        assert all(torch.equal(tensor, saved[f"ema/{name}"]) for name, tensor in own.items())


def test_all_processes_skip_a_step_that_is_non_finite_in_one_and_name_its_origin(runs: Path) -> None:
    (event,) = [line for line in lasting_metrics(runs / "poisoned") if "event" in line]
    assert (event["event"], event["step"]) == ("skipped", 4)
    assert event["origin"] == "the input of UViT was already non-finite"
    assert all(tensor.isfinite().all() for tensor in final_tensors(runs / "poisoned").values())


ALONE = {
    "save": ("scalelong.utils.atomic.Files.write_tensors", 0, "could not save the checkpoint of step 0"),
    "lock": ("scalelong.runs.run_dir.Run.locked", 0, "No space left on device"),
    "tracker": ("scalelong.training.logger.TensorBoard.__init__", 0, "could not start tensorboard"),
    "log": ("scalelong.runs.run_dir.MetricsLog.write", 0, "No space left on device"),
    "data": ("scalelong.data.batches.Batches.at", 1, "No space left on device"),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes by the command line, in each of which one fails alone."""
    folder = tmp_path_factory.mktemp("failures")
    command = ["train", "digits", *sets(*TINY, "training.trackers=[tensorboard]")]
    in_processes(
        *(
            {
                **{"out": folder / kind, "processes": 2, "fails_at": name, "failing_rank": rank, "code": 2},
                **{"command": [*command, "--out", folder / kind], "beside": True},
            }
            for kind, (name, rank, _) in ALONE.items()
        )
    )
    return folder


@pytest.mark.parametrize("kind", ALONE)
def test_a_process_that_fails_alone_says_why_and_the_other_ends_with_one_line_too(kind: str, failures: Path) -> None:
    _, failing, message = ALONE[kind]
    said = [(failures / f"{kind}-said-{rank}").read_text() for rank in range(2)]
    prefixes = ["error: ", "error: process 1: "]
    for rank, text in enumerate(said):
        assert text.startswith(prefixes[rank]) and text.count("\n") == 1, text
    assert message in said[failing]
    assert "another process of this run" in said[1 - failing]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_killed_ten_times_ends_as_one_never_killed(processes: int, precision: str, tmp_path: Path) -> None:
    overrides = [*EVALUATED, "training.steps=20", f"training.precision={precision}"]
    options = {"processes": processes, "overrides": overrides}
    in_processes(
        {"out": tmp_path / "whole", **options}, {"out": tmp_path / "killed", "kills": 10, "seed": 7, **options}
    )
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_torchrun_trains_and_only_its_first_process_speaks(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "scalelong"]
    command = [sys.executable, *launcher, "train", "digits", *sets(*TINY), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [f"{step}/8" for step in range(1, 9)]
    assert sum(line.startswith("finished") for line in lines) == 1
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 8
