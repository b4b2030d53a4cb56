"""Laws of the κ probe: matched short runs, of which the better half is trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from scalelong.compare.kappa_trials import Probe, Score, probe_kappas, score, spread_over
from scalelong.config import Config, load_recipe
from scalelong.guard.nonfinite import TrainingDiverged
from scalelong.kappa.advisor import KappaBand
from scalelong.runs import RunError
from scalelong.training import Display, Trainer

TINY = (
    *("model.embed_dim=16", "model.depth=4", "model.num_heads=2", "data.validation_count=10"),
    *("training.batch_size=8", "training.validate_every=null", "training.sample_every=null"),
)


def test_a_value_that_caught_up_in_a_later_round_is_not_ruled_out() -> None:
    def scored(kappa: float, behind: float) -> Score:
        return Score(kappa, 10, 1 + behind, 0.1, behind, 0.01)

    first = (scored(0.9, 0.0), scored(0.7, 0.025), scored(0.5, 0.03))
    found = Probe((first, (scored(0.7, 0.0), scored(0.9, 0.025))))
    assert [found.rules_out(kappa) for kappa in (0.7, 0.9, 0.5)] == [False, True, True]
    assert not found.rules_out(0.1), "it was never tried"


def test_scores_are_compared_image_by_image() -> None:
    """A difference that is the same for every image is certain, however much the images differ."""
    losses = torch.linspace(0, 1, 50, dtype=torch.float64)
    best, other = score({0.5: losses + 0.125, 0.7: losses}, steps=3)
    assert (best.kappa, best.behind, best.behind_error) == (0.7, 0.0, 0.0)
    assert other.behind == pytest.approx(0.125, rel=1e-12) and other.behind_error < 1e-15
    assert other.standard_error == pytest.approx(losses.std().item() / math.sqrt(50), rel=1e-9)


def test_candidates_span_the_band_and_hold_the_recommended_value() -> None:
    kappas = spread_over(KappaBand(0.4, 1.0), 0.7)
    assert kappas == [0.4, 0.7, 0.8, 1.0] or kappas == [0.4, 0.6, 0.7, 1.0]
    assert spread_over(KappaBand(0.5, 0.5), 0.5) == [0.5]


def tiny(*overrides: str) -> Config:
    return load_recipe("digits", [*TINY, "training.steps=40", *overrides])


def test_the_probe_trains_all_then_the_better_half_twice_as_long(tmp_path: Path) -> None:
    found = probe_kappas(tiny(), [0.4, 0.6, 0.8], tmp_path, steps=2)
    first, last = found.rounds
    assert {ranked.kappa for ranked in first} == {0.4, 0.6, 0.8}
    assert {ranked.kappa for ranked in last} == {ranked.kappa for ranked in first[:2]}
    assert ([ranked.steps for ranked in first], [ranked.steps for ranked in last]) == ([2] * 3, [4] * 2)
    assert all(a.loss <= b.loss for scores in found.rounds for a, b in zip(scores, scores[1:], strict=False))
    assert {path.name for path in tmp_path.iterdir()} == {"kappa-0.4", "kappa-0.6", "kappa-0.8"}
    assert probe_kappas(tiny(), [0.4, 0.6, 0.8], tmp_path / "again", steps=2) == found


def diverge(monkeypatch: pytest.MonkeyPatch, *kappas: float) -> list[float | None]:
    """Let the guard give up runs with some κ at their first step; returns the κ of all steps."""
    trained, train_step = [], Trainer.train_step

    def step(self: Trainer) -> Any:
        trained.append(self.config.scaling.kappa)
        if self.config.scaling.kappa in kappas:
            raise TrainingDiverged("training diverged: the numbers were not finite")
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", step)
    return trained


def test_a_kappa_that_diverges_ranks_last_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = diverge(monkeypatch, 0.4, 0.9)
    found = probe_kappas(tiny(), [0.4, 0.6, 0.8, 0.9], tmp_path, steps=2)
    first, last = found.rounds
    assert {ranked.kappa for ranked in first[2:] if ranked.diverged} == {0.4, 0.9}
    assert {ranked.kappa for ranked in last} == {0.6, 0.8}
    assert found.rules_out(0.4) and found.rules_out(0.9)
    json.dumps(found.summary(), allow_nan=False)
    trained.clear()
    assert probe_kappas(tiny(), [0.4, 0.6, 0.8, 0.9], tmp_path, steps=2) == found
    assert trained == [], "what diverged is known too"


def test_a_probe_ends_with_the_one_kappa_that_does_not_diverge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diverge(monkeypatch, 0.4, 0.8)
    found = probe_kappas(tiny(), [0.4, 0.6, 0.8], tmp_path, steps=2)
    assert (found.best, found.decided, len(found.rounds)) == (0.6, True, 1)


def test_a_probe_in_which_every_kappa_diverges_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diverge(monkeypatch, 0.4, 0.6)
    with pytest.raises(TrainingDiverged, match=r"every κ of the probe diverged \(0.4, 0.6\) within 2 steps"):
        probe_kappas(tiny(), [0.4, 0.6], tmp_path, steps=2)


class Killed(Display):
    """Says what a probe says, and dies at the n-th step of all its runs, as by SIGKILL: nothing is saved."""

    def __init__(self, after: int) -> None:
        self.said: list[str] = []
        self.left = after
        super().__init__(self.said.append)

    def step(self, step: int, loss: float) -> None:
        self.left -= 1
        if self.left < 0:
            raise MemoryError("killed")


@pytest.mark.parametrize("after", [3, 7])
def test_a_probe_that_was_killed_in_either_round_finds_the_same_when_it_goes_on(after: int, tmp_path: Path) -> None:
    """Rounds of 2 and 4 steps: step 3 is the second run's, step 7 that of a run that went on to the second round."""
    kappas, folder = [0.4, 0.6, 0.8], tmp_path / "killed"
    with pytest.raises(MemoryError):
        probe_kappas(tiny(), kappas, folder, steps=2, display=Killed(after))
    again = Killed(100)
    found = probe_kappas(tiny(), kappas, folder, steps=2, display=again)
    assert found == probe_kappas(tiny(), kappas, tmp_path / "whole", steps=2)
    assert sum(line.startswith("probe: κ = ") for line in again.said) == (4 if after == 3 else 2)
    assert again.said[0].startswith("probe: κ = 0.6, steps 0 to 2" if after == 3 else "probe: κ = ")
    assert probe_kappas(tiny(), kappas, folder, steps=2, display=Killed(0)) == found, "nothing is left to train"
    with pytest.raises(RunError, match=r"kappa-0.\d is at step \d, beyond 1: give the probe another --out"):
        probe_kappas(tiny(), kappas, folder, steps=1)
