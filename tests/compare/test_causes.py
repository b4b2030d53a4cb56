"""What replays say: which changes save a run, and whether one cause can be named."""

from __future__ import annotations

import math

import pytest

from scalelong.compare.causes import CHANGES, UNCHANGED, Judge, Tally, chance_of, conclude, is_open, outliers, saves
from scalelong.guard.losses import LossWatch

BY_ID = {change.id: change for change in CHANGES}
NONE_SURVIVE = Tally(UNCHANGED, 0, 4)


def tallies(unchanged: Tally = NONE_SURVIVE, **saved: tuple[int, int]) -> list[Tally]:
    found = {name.replace("_", "-"): counts for name, counts in saved.items()}
    return [unchanged, *(Tally(BY_ID[name], *counts, 0.2 + 0.1 * n) for n, (name, counts) in enumerate(found.items()))]


def test_a_cause_is_named_if_only_its_kind_of_change_saves_the_run() -> None:
    verdict = conclude(tallies(beta2=(0, 1), lr_half=(3, 3), lr_quarter=(3, 3), cs=(1, 2)))
    assert (verdict.kind, verdict.groups, verdict.best) == ("named", ("rate",), BY_ID["lr-half"])
    assert verdict.sentence.startswith("Only a change of the rate saves the run (0 of 4")
    assert "Not clearly: β2 = 0.95, CS, κ = 0.7." in verdict.sentence


def test_several_kinds_are_all_told_and_the_narrowest_is_said() -> None:
    verdict = conclude(tallies(lr_half=(4, 4), module=(3, 3), clip_norm=(4, 4)))
    assert (verdict.kind, verdict.groups) == ("several", ("module", "clipping", "rate"))
    assert "no single cause can be named" in verdict.sentence and "narrowest of them is the module" in verdict.sentence


def test_nothing_is_named_if_nothing_saves_the_run_clearly() -> None:
    verdict = conclude(tallies(lr_half=(2, 4), beta2=(0, 1)))
    assert (verdict.kind, verdict.groups, verdict.best) == ("none", (), None)
    assert "Most with lr × ½ (2 of 4)" in verdict.sentence


def test_a_collapse_that_half_of_the_unchanged_replays_escape_was_chance() -> None:
    verdict = conclude(tallies(Tally(UNCHANGED, 4, 8), lr_half=(5, 8), eps=(8, 8)))
    assert verdict.kind == "chance" and "4 of 8 replays with nothing changed survive" in verdict.sentence
    assert "Still more survive with ε = 1e-6 (8 of 8)" in verdict.sentence


@pytest.mark.parametrize(("saved", "of", "clear"), [(4, 4, True), (3, 3, True), (2, 2, False), (3, 4, False)])
def test_clearly_more_is_fishers_exact_test(saved: int, of: int, clear: bool) -> None:
    assert saves(Tally(CHANGES[0], saved, of), NONE_SURVIVE) == clear
    assert (chance_of(saved, of, 0, 4) <= 0.05) == clear


def test_a_change_is_replayed_until_it_is_plain_whether_it_saves_the_run() -> None:
    change = CHANGES[0]
    open_after = [
        (saved, of) for of in range(4) for saved in range(of + 1) if is_open(Tally(change, saved, of), NONE_SURVIVE, 4)
    ]
    assert open_after == [(0, 0), (1, 1), (2, 2)]
    assert not is_open(Tally(change, 0, 0), Tally(UNCHANGED, 6, 8), 8), "no number of replays could be clearly more"


def judged(losses: list[float], place: int = 40, limit: float = math.inf) -> Judge:
    watch = LossWatch(nothing=1.0)
    judge = Judge(watch, place, limit)
    for loss in losses:
        if judge.add(loss):
            break
    return judge


def test_a_replay_that_stays_collapsed_is_ended_beyond_the_place_of_the_collapse() -> None:
    judge = judged(40 * [0.2] + 400 * [0.95])
    assert len(judge.losses) == 40 + 100 and not judge.saved and judge.begun == 40


def test_a_replay_that_comes_back_is_saved() -> None:
    judge = judged(40 * [0.2] + 40 * [0.95] + 60 * [0.25])
    assert judge.saved and judge.begun is None and judge.loss == pytest.approx(0.25)


def test_a_replay_is_lost_if_it_ends_collapsed_or_not_finite() -> None:
    assert not judged(60 * [0.2] + 20 * [0.95]).saved
    assert not judged(60 * [0.2] + [math.nan]).saved


def test_where_the_run_had_not_learned_before_a_replay_must() -> None:
    assert not judged(100 * [0.8], limit=0.6).saved
    assert judged(40 * [0.8] + 60 * [0.4], limit=0.6).saved


def test_the_losses_that_stood_out_are_those_before_all_do() -> None:
    losses = [0.2 + 0.001 * (step % 7) for step in range(60)] + [30.0] + 100 * [1.0]
    found = outliers(losses, begun=60)
    assert found[0] == 60 and len(found) <= 20
