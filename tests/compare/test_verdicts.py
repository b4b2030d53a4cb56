"""What is said of a speed-up, and how many more seeds are advised."""

from __future__ import annotations

import pytest
import torch

from scalelong.compare import Speedup
from scalelong.compare.intervals import bootstrap_interval
from scalelong.compare.speedup import judge, seeds_to_settle


def standardised(count: int, mean: float, spread: float) -> list[float]:
    """Numbers with exactly this mean and standard deviation."""
    x = torch.linspace(-1, 1, count, dtype=torch.float64)
    return (mean + spread * x / x.std()).tolist()


@pytest.mark.parametrize("effect", [0.5, 0.8, 1.2])
def test_with_the_advised_seeds_a_difference_as_large_as_seen_is_settled_four_times_in_five(effect: float) -> None:
    more = seeds_to_settle(standardised(3, effect, 1.0))
    assert more is not None
    draws = torch.randn(500, 3 + more, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, _ = bootstrap_interval(draws + effect)
    assert (low > 0).double().mean().item() == pytest.approx(0.8, abs=0.07)


def test_the_smaller_the_difference_the_more_seeds_until_more_than_200_are_not_advised() -> None:
    advised = [seeds_to_settle(standardised(3, effect, 1.0)) for effect in (-1.0, 0.5, 0.25, 0.2, 0.15, 0.0)]
    # With the three there are: the 10, 34, 128 and 199 pairs that tables of the paired t test give.
    assert advised == [7, 31, 125, 196, None, None]


def test_advice_is_given_only_where_no_difference_is_shown() -> None:
    assert judge([0.3, 0.5, 0.4]).more_seeds is None
    assert judge([-0.3, -0.5, -0.4]).more_seeds is None
    undecided = judge([-0.1, 0.1, 0.3])
    assert (undecided.verdict, undecided.more_seeds) == ("no difference shown", 31)


def test_a_stricter_interval_needs_a_clearer_difference() -> None:
    logs = [0.1, 0.5, 0.3, 0.4]
    assert judge(logs, confidence=0.95).verdict == "faster"
    assert judge(logs, confidence=0.999).verdict == "no difference shown"


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            Speedup(1.524, 1.31, 1.772, 5, "faster"),
            "CS reaches the final validation loss of none in 1.52× fewer steps (95 % interval 1.31 to 1.77, 5 seeds).",
        ),
        (
            Speedup(1.1, 1.0021, 1.2, 5, "faster", clock="seconds", confidence=0.9),
            "CS reaches the final validation loss of none in 1.10× fewer seconds "
            "(90 % interval 1.002 to 1.20, 5 seeds).",
        ),
        (
            Speedup(0.8, 0.5, 0.9, 4, "slower"),
            "CS takes 1.25× as many steps as none to the same loss (95 % interval 1.11 to 2.00, 4 seeds).",
        ),
        (
            Speedup(1.08, 0.93, 1.26, 3, "no difference shown", 9),
            "CS against none, no difference shown: 1.08× in steps (95 % interval 0.93 to 1.26, 3 seeds); "
            "about 9 more seeds would settle a difference of this size.",
        ),
        (
            Speedup(1.2, 0.99, 1.4, 3, "no difference shown", 1, diverged=1),
            "CS against none, no difference shown: 1.20× in steps (95 % interval 0.99 to 1.40, 3 seeds); "
            "about 1 more seed would settle a difference of this size. "
            "1 of 3 runs of CS diverged, which counts as never getting there.",
        ),
        (
            Speedup(1.0, 0.9, 1.1, 4, "no difference shown", baseline_diverged=1, diverged=2),
            "CS against none, no difference shown: 1× in steps (95 % interval 0.90 to 1.10, 4 seeds); "
            "to settle so small a difference would take more than 200 more seeds. "
            "2 of 4 runs of CS and 1 of 4 runs of none diverged, which counts as never getting there.",
        ),
        (
            Speedup(16.0, 16.0, 16.0, 3, "faster", early=3),
            "CS reaches the final validation loss of none in at least 16.00× fewer steps (3 seeds). "
            "At the first evaluation there already: CS with 3 of 3 seeds. "
            "Evaluate earlier (training.validate_every) to see all of it.",
        ),
        (
            Speedup(0.25, 0.125, 0.5, 3, "slower", baseline_early=1),
            "CS takes at least 4.00× as many steps as none to the same loss (95 % interval 2.00 to 8.00, 3 seeds). "
            "At the first evaluation there already: none with 1 of 3 seeds. "
            "Evaluate earlier (training.validate_every) to see all of it.",
        ),
        (
            Speedup(None, None, None, 5, "cannot be judged", diverged=3),
            "CS cannot be judged against none: 3 of 5 runs of CS diverged.",
        ),
        (
            Speedup(1.4, None, None, 1, "cannot be judged"),
            "CS cannot be judged against none: that takes at least 2 seeds, and there is 1.",
        ),
        (
            Speedup(None, None, None, 0, "cannot be judged"),
            "CS cannot be judged against none: that takes at least 2 seeds, and there are none.",
        ),
        (
            Speedup(None, None, None, 3, "cannot be judged"),
            "CS cannot be judged against none: it takes more than one evaluation of the validation loss.",
        ),
    ],
)
def test_the_sentence_says_what_was_found_and_what_it_rests_on(found: Speedup, sentence: str) -> None:
    assert found.sentence("CS", "none") == sentence


def test_the_word_faster_and_fewer_are_never_in_a_sentence_whose_interval_holds_1() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        logs = (0.1 * torch.randn(4, generator=generator, dtype=torch.float64) + 0.08).tolist()
        found = judge(logs)
        assert found.low is not None
        assert ("fewer" in found.sentence("CS")) == (found.low > 1) == (found.verdict == "faster")
