"""How a run ended: why it failed, and how it bears extra noise."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from comparison_cases import tiny_plan

from scalelong.compare import outcome
from scalelong.compare.collect import RunRecord, collect
from scalelong.compare.grid import PlannedRun
from scalelong.compare.outcome import SIGMAS, Outcome, read_outcome
from scalelong.evaluation import Evaluation, Figure, Plan
from scalelong.evaluation.results import record
from scalelong.guard.losses import TrainingDiverged
from scalelong.runs import Run, read_metrics
from scalelong.training import Trainer

AT_ONCE = "optim.warmup_steps=0"


def planned(*more: str, method: str = "cs") -> PlannedRun:
    return tiny_plan(method, seeds=1, more=more).runs[0]


def status_of(folder: Path, run: PlannedRun) -> str | None:
    found = outcome.train_and_measure(folder, run.config)
    return None if found is None else found.status


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, run = tmp_path_factory.mktemp("finished"), planned()
    assert status_of(out / run.folder, run) == "finished"
    return out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_extra_noise_the_loss_is_the_runs_own_validation_loss(
    precision: str, finished: Path, tmp_path: Path
) -> None:
    out, run = finished if precision == "fp32" else tmp_path, planned(f"training.precision={precision}")
    assert status_of(out / run.folder, run) == "finished"
    found = read_outcome(out / run.folder)
    assert found is not None and found.noise_losses is not None
    assert len(found.noise_losses) == len(SIGMAS) and SIGMAS[0] == 0
    last = [line for line in read_metrics(Run(out / run.folder).metrics.path) if "validation_loss_ema" in line][-1]
    assert found.noise_losses[0] == last["validation_loss_ema"]
    assert len(set(found.noise_losses)) == len(SIGMAS), "each σ is measured for itself"


def test_a_run_that_has_ended_is_not_touched_again(finished: Path) -> None:
    run = planned()
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("metrics.jsonl")}
    assert status_of(finished / run.folder, run) == "finished"
    assert before and before == {path: path.stat().st_mtime_ns for path in finished.rglob("metrics.jsonl")}


def test_a_record_holds_what_the_run_has_written(finished: Path) -> None:
    found = collect(finished, planned())
    assert tuple(found.losses) == tuple(range(1, 11)) and found.step == 10
    assert found.curve.losses == tuple(found.losses.values())
    # Two skips at depth 4: the outermost keeps 1, the other has κ.
    assert found.coefficients == {1: 1.0, 2: pytest.approx(0.7)}
    # The index is given from the fifth reading on.
    assert tuple(found.oscillation["feature"]) == tuple(found.oscillation["gradient"]) == tuple(range(5, 11))
    assert found.seconds > 0 and found.seconds_per_step is not None


def test_the_event_of_an_oscillation_is_no_reading(finished: Path, tmp_path: Path) -> None:
    run = planned()
    shutil.copytree(finished / run.folder, tmp_path / run.folder)
    event = {"step": 10, "event": "state", "state": "growing", "block": "mid", "message": "growing since step 10"}
    for _ in range(10):
        Run(tmp_path / run.folder).metrics.write(event)
    assert collect(tmp_path, run).coefficients == collect(finished, run).coefficients


@pytest.mark.parametrize("first", [60.0, 600.0], ids=["shorter", "longer"])
def test_the_seconds_of_a_run_are_those_of_all_its_sessions(first: float, finished: Path, tmp_path: Path) -> None:
    """Whether the first lap after it resumes is shorter or longer than all that came before."""
    run = planned()
    shutil.copytree(finished / run.folder, tmp_path / run.folder)
    folder = Run(tmp_path / run.folder)
    (folder.folder / outcome.FILE).unlink()  # Else the log is bound to the last checkpoint.
    folder.environment_file.write_text(json.dumps([{"step": 0}, {"step": 4}, {"step": 6}]))
    seconds = [1.0, 2.0, 3.0, 100.0, first, first + 1, 5.0, 6.0, 7.0, 8.0]
    lines = [{"step": step, "seconds": value} for step, value in enumerate(seconds, start=1)]
    folder.metrics.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert collect(tmp_path, run).seconds == 100.0 + first + 1 + 8.0


@pytest.mark.parametrize(
    ("rate", "cause"), [("1.0", "did not learn"), ("1e30", "not finite")], ids=["far above", "not a number"]
)
def test_a_run_that_ends_far_above_its_start_or_without_a_number_has_failed(
    rate: str, cause: str, tmp_path: Path
) -> None:
    # More skipped steps than there are: the guard lets the run come to its end.
    run = planned(f"optim.lr={rate}", AT_ONCE, "training.max_skipped=20")
    found = outcome.train_and_measure(tmp_path / run.folder, run.config)
    assert found is not None and found.status == "failed" and found.message is not None
    assert found.cause == cause
    assert found.message.startswith("final validation loss") and "untrained" in found.message
    collected = collect(tmp_path, run)
    assert collected.final_loss == collected.curve.losses[-1] == float("inf")
    content = (tmp_path / run.folder / outcome.FILE).read_text()
    json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_run_that_the_guard_gives_up_has_failed_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = Trainer.train_step

    def give_up(self: Trainer) -> object:
        if self.state.step == 6:
            raise TrainingDiverged("the numbers were not finite")
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", give_up)
    run = planned()
    found = outcome.train_and_measure(tmp_path / run.folder, run.config)
    assert found is not None
    assert (found.status, found.cause) == ("failed", "given up")
    assert found.message is not None
    assert found.message.startswith("training diverged: the numbers were not finite. Lower")
    collected = collect(tmp_path, run)
    assert collected.outcome is not None and collected.outcome.step == collected.step == 6
    assert collected.outcome.initial_loss is not None
    assert not math.isfinite(collected.final_loss), "it never reached a final loss"


def evaluation(step: int, distance: float, weights: str = "ema", images: int = 20) -> Evaluation:
    facts = {"network": "efficientnet-lite0", "images": images}
    return Evaluation(facts, {"FD-EffNet": Figure(distance), "recall": Figure(0.5)}, step, weights)


def test_the_curve_of_distances_is_that_of_one_kind_of_evaluation(finished: Path, tmp_path: Path) -> None:
    run = planned("evaluation.images=20")
    shutil.copytree(finished / run.folder, tmp_path / run.folder)
    assert collect(tmp_path, run).distances == {}
    # The last one was made by hand, with more images than the recipe asks for.
    found = [evaluation(5, 40.0), evaluation(5, 9.0, "raw"), evaluation(10, 30.0), evaluation(10, 70.0, images=50)]
    record(tmp_path / run.folder, found)
    collected = collect(tmp_path, run)
    assert (collected.distance_name, collected.distances) == ("FD-EffNet", {5: 40.0, 10: 30.0})
    assert (collected.final_distance, collected.raw_distance) == (30.0, None)
    record(tmp_path / run.folder, [evaluation(10, 50.0, "raw")])
    assert collect(tmp_path, run).raw_distance == 50.0


@pytest.mark.parametrize("status", ["failed", "stopped early"])
def test_a_run_that_did_not_come_to_its_end_has_no_final_distance(status: str) -> None:
    ended = Outcome("failed" if status == "failed" else "finished", 10, None, 1.0)
    distances = {5: 40.0, 10: 30.0} if status == "failed" else {5: 40.0}
    assert RunRecord(0, "runs/cs/seed-0", 10, ended, distances=distances).final_distance is None


def test_a_last_step_that_a_signal_kept_from_being_evaluated_is_evaluated_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Plan] = []
    monkeypatch.setattr(outcome, "evaluate_run", lambda folder, plan: asked.append(plan))
    wanted = planned("evaluation.every=5", "evaluation.images=20").config
    record(tmp_path, [evaluation(5, 40.0)])
    outcome.evaluate_last_step(tmp_path, wanted)
    assert asked == [Plan(20, ("ema",), wanted.evaluation.network, allow_code=True)]
    record(tmp_path, [evaluation(10, 30.0)])
    outcome.evaluate_last_step(tmp_path, wanted)
    both = planned("evaluation.every=5", "evaluation.images=20", "evaluation.weights=both").config
    outcome.evaluate_last_step(tmp_path, both)
    assert asked[1:] == [Plan(20, ("raw",), wanted.evaluation.network, allow_code=True)]
    asked.pop()
    outcome.evaluate_last_step(tmp_path / "no evaluation asked for", planned().config)
    assert len(asked) == 1


STOPPED_EARLY = ("optim.lr=1.0", AT_ONCE, "training.validate_every=1", "training.sample_every=10", "sampling.steps=2")


def test_a_run_that_is_stopped_is_saved_where_it_stops_and_sampled_there(tmp_path: Path) -> None:
    run = planned(*STOPPED_EARLY)
    folder = Run(tmp_path / run.folder)
    outcome.run_until_failed(folder.folder, run.config)
    found = outcome.read_outcome(folder.folder)
    assert found is not None and (found.status, found.cause) == ("failed", "did not learn")
    assert found.step < run.config.training.steps and folder.checkpoints().steps()[-1] == found.step
    assert [path.name for path in folder.samples.iterdir()] == [folder.grid(found.step).name]


def test_a_run_killed_after_it_was_stopped_is_not_trained_any_further(tmp_path: Path) -> None:
    run = planned(*STOPPED_EARLY)
    folder = Run(tmp_path / run.folder)
    outcome.run_until_failed(folder.folder, run.config)
    before = (folder.folder / outcome.FILE).read_text(), folder.metrics.path.read_text()
    (folder.folder / outcome.FILE).unlink()
    outcome.run_until_failed(folder.folder, run.config)
    assert ((folder.folder / outcome.FILE).read_text(), folder.metrics.path.read_text()) == before
