"""When a run has failed, by a reference that is fixed before the first run; and methods compared by survival first."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from comparison_cases import tiny_plan
from torch import Tensor, nn

from scalelong.compare import outcome
from scalelong.compare.collect import RunRecord, collect
from scalelong.compare.failure import Reference, cause_of_failure, has_clearly_failed
from scalelong.compare.outcome import Outcome
from scalelong.compare.reference import reference_of
from scalelong.compare.results import Metadata, summarise
from scalelong.config import load_recipe
from scalelong.training.loss import Validation, open_validation

LINEAR_EPSILON = Reference(1.0, 0.186)


class Zeros(nn.Module):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return torch.zeros_like(x)


def validation_of(prediction: str, *more: str) -> Validation:
    return open_validation(load_recipe("digits", [f"diffusion.prediction={prediction}", *more]))


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
def test_a_network_that_outputs_zeros_has_failed(prediction: str) -> None:
    validation = validation_of(prediction)
    reference, zeros = reference_of(validation), validation.loss(Zeros())
    assert reference.simple < reference.nothing <= zeros + 1e-6
    assert cause_of_failure(zeros, reference.limit(0.5)) == "did not learn"
    assert cause_of_failure(zeros, reference.limit(0.01)) == "did not learn", "however little a run must gain"


def test_predicting_nothing_costs_the_noise_itself_or_the_spread_of_the_images_about_the_mean_one() -> None:
    noise, images = validation_of("epsilon"), validation_of("x0")
    assert reference_of(noise).nothing == pytest.approx(noise.noise.square().mean().item(), rel=1e-5)
    assert reference_of(noise).nothing == pytest.approx(noise.loss(Zeros()), rel=1e-5)
    data = images.data.pick(torch.arange(len(images)), images.seeds).images.double() / 127.5 - 1
    assert reference_of(images).nothing == pytest.approx(data.var(0, correction=0).mean().item(), rel=1e-4)


def test_the_reference_does_not_depend_on_the_batch_size() -> None:
    one, other = (reference_of(validation_of("v", f"training.batch_size={size}")) for size in (32, 100))
    assert (one.nothing, one.simple) == pytest.approx((other.nothing, other.simple), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "given_up", "cause"),
    [
        *((0.1, False, None), (0.99, False, "did not learn"), (0.1, True, "given up"), (math.nan, True, "given up")),
        *((math.nan, False, "not finite"), (math.inf, False, "not finite")),
    ],
)
def test_there_are_three_causes(loss: float, given_up: bool, cause: str | None) -> None:
    assert cause_of_failure(loss, LINEAR_EPSILON.limit(0.5), given_up=given_up) == cause


def test_a_run_is_stopped_only_where_it_shows_no_sign_of_learning() -> None:
    def stops_at(losses: list[float]) -> int | None:
        seen = range(1, len(losses) + 1)
        return next((k for k in seen if has_clearly_failed(losses[:k], LINEAR_EPSILON, 0.5, 20)), None)

    assert stops_at([1.0] * 20) == 10, "half of the run is waited for"
    assert stops_at([0.5, 0.3, *[1.0] * 18]) == 10
    assert stops_at([0.5] * 14 + [1.0] * 6) == 19, "for a quarter of the run"
    assert stops_at([1.0 - 0.01 * k for k in range(20)]) is None, "slowly is a sign"
    assert stops_at([0.5, 0.4, math.nan]) == 3


def test_a_run_that_has_clearly_failed_is_stopped_and_says_so_again_when_asked(tmp_path: Path) -> None:
    run = tiny_plan("cs", seeds=1, more=("optim.lr=1.0", "optim.warmup_steps=0", "training.must_gain=0.5")).runs[0]
    place = tmp_path / run.folder
    place.mkdir(parents=True)
    outcome.run_until_failed(place, run.config)
    found = outcome.read_outcome(place)
    assert found is not None and (found.status, found.cause, found.step) == ("failed", "did not learn", 5)
    (place / outcome.FILE).unlink()
    outcome.run_until_failed(place, run.config)
    assert outcome.read_outcome(place) == found, "as after a kill"
    record = collect(tmp_path, run)
    assert record.failed and not record.survived and record.final_loss == math.inf
    assert record.measured_loss == record.losses[5], "what it ended at counts for the sensitivity"


def ended(seed: int, loss: float) -> RunRecord:
    """A run of predicted noise with this loss at its end."""
    steps = range(1, 11)
    losses = {step: max(loss, 0.9 - 0.1 * step) * (1 + 0.001 * seed) for step in steps}
    cause = cause_of_failure(loss, LINEAR_EPSILON.limit(0.5))
    message = None if cause is None else "final validation loss …"
    return RunRecord(
        seed, f"runs/{seed}", 10, Outcome("failed" if cause else "finished", 10, message, 1.1, cause=cause), losses
    )


@pytest.mark.parametrize(
    ("none", "failed", "verdict"),
    [
        # Their mean is 0.746 ± 0.615, which a t test cannot tell from 0.143 ± 0.003.
        ([0.9395, 0.9395, 0.9395, 0.166], 3, "cannot be judged"),
        ([1.0, 0.99, 1.01, 0.98], 4, "survives more"),
    ],
)
def test_runs_that_end_where_predicting_nothing_does_are_failures_that_decide(
    none: list[float], failed: int, verdict: str
) -> None:
    records = {
        "none": [ended(seed, loss) for seed, loss in enumerate(none)],
        "cs": [ended(seed, loss) for seed, loss in enumerate([0.141, 0.145, 0.142, 0.144])],
    }
    plan = tiny_plan("none", "cs", seeds=4)
    results = summarise(plan, records, Metadata("the same", "then", workers=1, threads=1))
    assert [arm["failed"]["count"] for arm in results["arms"]] == [failed, 0]
    assert {run["cause"] for run in results["arms"][0]["runs"]} == {"did not learn"} | ({None} if failed < 4 else set())
    (pair,) = results["comparisons"]
    assert pair["verdict"] == verdict and "no difference shown" not in pair["sentence"]
    assert pair["sentence"].startswith(f"4 of 4 runs of CS κ=0.7 survive and {4 - failed} of 4 of none:")
    assert f"Both survive with {4 - failed} of 4 seeds: their speed cannot be judged." in pair["sentence"]
    assert pair["final_loss"] is None or pair["final_loss"]["p"] is None


def test_speed_is_that_of_the_pairs_in_which_both_survive() -> None:
    whole = {
        "none": [ended(seed, 0.2) for seed in range(4)],
        "cs": [ended(seed, 0.14) for seed in range(4)],
    }
    lost = {**whole, "none": [*whole["none"][:3], ended(3, 0.99)]}
    few = {name: runs[:3] for name, runs in whole.items()}
    metadata = Metadata("the same", "then", workers=1, threads=1)
    found = summarise(tiny_plan("none", "cs", seeds=4), lost, metadata)["comparisons"][0]
    alone = summarise(tiny_plan("none", "cs", seeds=3), few, metadata)["comparisons"][0]
    assert found["speedup_steps"] == alone["speedup_steps"] and found["pairs"] == 4
    assert "Both survive with 3 of 4 seeds; of those: CS" in found["sentence"]
    assert found["final_loss"] == alone["final_loss"]
