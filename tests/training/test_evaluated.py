"""A run that is evaluated while it trains has the figures of `scalelong evaluate`, and is otherwise the same run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import contents
from evaluation_cases import script_file
from run_cases import SignalAt, assert_same_run, final_tensors, in_processes, lasting_metrics, run_tiny, tiny
from torch import Tensor, nn

from scalelong.config import build_model
from scalelong.config.build import conditioning_of
from scalelong.diffusion.guidance import NOTHING
from scalelong.evaluation import Evaluator, NotComparable, Plan, evaluate_run, read_evaluations
from scalelong.evaluation import evaluate as evaluating
from scalelong.evaluation.results import check_comparable
from scalelong.runs import Run
from scalelong.training import Display, TrainResult
from scalelong.utils.runtime import SINGLE

pytest.importorskip("torchmetrics")

# Two blocks, the second of which is short.
IMAGES = 300
EVALUATED = (
    *("data.validation_count=1500", "training.steps=6", "sampling.sampler=ddim", "sampling.steps=2"),
    *(
        f"evaluation.images={IMAGES}",
        "evaluation.weights=both",
        "evaluation.every=2",
        "evaluation.network=torchscript:net.pt",
    ),
)
SLOW = ("training.steps=2", "evaluation.weights=ema", "training.sample_every=1")
BOTH = [(step, weights) for step in (2, 4, 6) for weights in ("ema", "raw")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a feature network, where statistics are kept as well."""
    folder = tmp_path_factory.mktemp("evaluated")
    script_file(folder / "net.pt")
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def run_evaluated(out: Path, *overrides: str, **options: Any) -> TrainResult:
    return run_tiny(out, *EVALUATED, *overrides, **options)


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run that was never stopped, not to be written to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run_evaluated(place / "whole")
    return place / "whole"


def assert_as_evaluated_afterwards(out: Path) -> None:
    """The last entries are to the bit what the command finds for the last checkpoint, which replaces none of them."""
    before = read_evaluations(out)
    found = evaluate_run(out, Plan(IMAGES, ("ema", "raw"), "torchscript:net.pt"))
    assert found == before[-2:]
    assert read_evaluations(out) == before


def test_every_n_steps_and_the_last_are_evaluated_and_logged(whole: Path) -> None:
    found = read_evaluations(whole)
    assert [(one.step, one.weights) for one in found] == BOTH
    logged = [line for line in lasting_metrics(whole) if "lr" not in line]
    assert [line.pop("step") for line in logged] == [2, 4, 6]
    assert logged == [{**found[k].numbers(), **found[k + 1].numbers()} for k in (0, 2, 4)]
    assert {"FD-net", "FD-net_low", "FD-net_high", "FD-net_raw", "KID-net_raw_low", "precision"} <= logged[0].keys()
    assert sorted(path.name for path in whole.iterdir() if "eval" in path.name) == ["evaluation.json"]


def test_the_figures_are_those_that_the_command_finds_for_the_checkpoint(whole: Path) -> None:
    assert_as_evaluated_afterwards(whole)


def test_an_evaluated_run_has_the_weights_and_losses_of_one_that_is_not(whole: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", *EVALUATED, "evaluation.every=null")
    found, expected = final_tensors(whole), final_tensors(tmp_path / "run")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [line for line in lasting_metrics(whole) if "lr" in line] == lasting_metrics(tmp_path / "run")


def test_evaluations_are_in_float32_whatever_the_precision_of_training(tmp_path: Path) -> None:
    run_evaluated(tmp_path / "run", "training.precision=bf16", "training.steps=2")
    assert_as_evaluated_afterwards(tmp_path / "run")


def test_evaluations_are_of_guided_images_where_the_recipe_guides(tmp_path: Path) -> None:
    guided = ("data.label_column=label", "labels.classes=10", "labels.drop=0.2", "sampling.guidance=2.0")
    run_evaluated(tmp_path / "run", *guided, "training.steps=2")
    assert read_evaluations(tmp_path / "run")[-1].fingerprint["sampler"] == "ddim, 2 steps, guidance 2"
    assert_as_evaluated_afterwards(tmp_path / "run")
    plain = evaluate_run(
        tmp_path / "run", Plan(IMAGES, ("ema", "raw"), "torchscript:net.pt", sampling={"guidance": 1.0})
    )
    assert [one.figures for one in plain] != [one.figures for one in read_evaluations(tmp_path / "run")[:2]]


def test_what_sharded_weights_draw_says_their_precision(tmp_path: Path) -> None:
    config = tiny(*EVALUATED, "training.precision=bf16")
    alone, sharded = (
        Evaluator(config, tmp_path, conditioning_of(config), NOTHING, rank=SINGLE, uses_fsdp=flag)
        for flag in (False, True)
    )
    assert [one.fingerprint["precision"] for one in (alone, sharded)] == ["fp32", "bf16"]
    with pytest.raises(NotComparable, match="the precision of the sampling is 'fp32' and 'bf16'"):
        check_comparable(alone.fingerprint, sharded.fingerprint)


def test_blocks_that_another_step_left_behind_are_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between two evaluations, where nobody tidied up."""
    config = tiny(*EVALUATED, "evaluation.images=40")
    evaluator = Evaluator(config, tmp_path, conditioning_of(config), NOTHING, rank=SINGLE, uses_fsdp=False)
    values = [
        evaluator.evaluate(build_model(tiny(*EVALUATED, f"seed={step}")).eval(), step, "ema", lambda: False)
        for step in (1, 2)
    ]
    assert values[0] is not None and values[1] is not None
    assert values[0].figures != values[1].figures


def test_a_library_that_is_missing_is_named_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.image.kid", None)
    with pytest.raises(ImportError, match="the KID needs torchmetrics"):
        run_evaluated(tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_run_stopped_between_evaluations_goes_on_without_losing_or_repeating_one(whole: Path, tmp_path: Path) -> None:
    assert run_evaluated(tmp_path / "run", display=SignalAt(3, signal.SIGTERM)).step == 3
    assert run_evaluated(tmp_path / "run").finished
    assert_same_run(tmp_path / "run", whole)
    assert read_evaluations(tmp_path / "run") == read_evaluations(whole)


def test_a_signal_stops_an_evaluation_which_is_made_up_for_when_the_run_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original = [], evaluating.features_of

    def features_of(*arguments: Any) -> Tensor:
        calls.append(arguments)
        if len(calls) == 5:  # Two blocks for each of two weights at step 2; this one is the first of step 4.
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluating, "features_of", features_of)
        stopped = run_evaluated(tmp_path / "run")
    assert (stopped.step, stopped.signal, len(calls)) == (4, signal.SIGTERM, 5)
    assert [one.step for one in read_evaluations(tmp_path / "run")] == [2, 2]
    assert run_evaluated(tmp_path / "run").finished
    assert_same_run(tmp_path / "run", whole)
    assert read_evaluations(tmp_path / "run") == read_evaluations(whole)


@pytest.mark.parametrize("step", [4, 6])
def test_an_evaluation_that_fails_costs_no_step_and_is_made_up_for_once(
    step: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Evaluator.evaluate

    def fail_at_step(self: Evaluator, model: nn.Module, at: int, *arguments: Any) -> Any:
        if at == step:
            raise MemoryError
        return evaluate(self, model, at, *arguments)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Evaluator, "evaluate", fail_at_step)
        run_evaluated(tmp_path / "run", "training.checkpoint_every=2")
    assert Run(tmp_path / "run").checkpoints().steps()[-1] == step
    resumed = run_evaluated(tmp_path / "run", "training.checkpoint_every=2")
    assert (resumed.trained, resumed.finished) == (6 - step, True)
    assert_same_run(tmp_path / "run", whole)
    assert read_evaluations(tmp_path / "run") == read_evaluations(whole)
    before = contents(tmp_path / "run")
    run_evaluated(tmp_path / "run", "training.checkpoint_every=2")
    assert contents(tmp_path / "run") == before


def test_a_run_that_goes_back_to_a_checkpoint_forgets_what_was_evaluated_later(whole: Path, tmp_path: Path) -> None:
    run_evaluated(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    run_evaluated(tmp_path / "run", "evaluation.every=5", "evaluation.weights=ema", resume=checkpoint)
    found = [(one.step, one.weights) for one in read_evaluations(tmp_path / "run")]
    assert found == [(2, "ema"), (2, "raw"), (5, "ema"), (6, "ema")]


class Told(Display):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, message: str) -> None:
        self.lines.append(message)


def test_a_run_whose_evaluations_are_lost_says_so_when_it_resumes(tmp_path: Path) -> None:
    run_evaluated(tmp_path / "run", display=SignalAt(3, signal.SIGTERM))
    (tmp_path / "run" / "evaluation.json").unlink()
    told = Told()
    assert run_evaluated(tmp_path / "run", display=told).finished
    assert any("evaluation.json has lost what was evaluated up to step 2" in line for line in told.lines)


@pytest.fixture(scope="module")
def together(place: Path) -> Path:
    """Runs of two processes: `ddp`, the same `killed` twice, and `fsdp`, where every forward pass takes both.

    In `slow`, the first process needs longer for a grid and for an evaluation's figures than collectives wait.
    """
    plan = {"processes": 2, "overrides": EVALUATED}
    in_processes(
        {"out": place / "slow", **plan, "overrides": [*EVALUATED, *SLOW], "measuring_seconds": 7, "beside": True},
        {"out": place / "ddp", **plan},
        {"out": place / "killed", "kills": 2, "seed": 1, **plan},
        {"out": place / "fsdp", **plan, "overrides": [*EVALUATED, "training.parallel=fsdp"]},
        folder=place,
    )
    return place


@pytest.mark.parametrize("kind", ["ddp", "killed", "fsdp"])
def test_two_processes_find_what_the_command_finds(kind: str, together: Path) -> None:
    assert [(one.step, one.weights) for one in read_evaluations(together / kind)] == BOTH
    assert_as_evaluated_afterwards(together / kind)


def test_no_process_waits_in_a_collective_for_the_length_of_a_grid_or_an_evaluation(together: Path) -> None:
    assert [path.name for path in sorted((together / "slow" / "samples").iterdir())] == [
        "step-000001.png",
        "step-000002.png",
    ]
    assert [one.step for one in read_evaluations(together / "slow")] == [2]


def test_two_processes_killed_again_and_again_have_the_evaluations_of_two_never_killed(together: Path) -> None:
    assert_same_run(together / "killed", together / "ddp")
    assert read_evaluations(together / "killed") == read_evaluations(together / "ddp")
