"""`scalelong.find_edge`: the search for the edge in a loop of the user's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import scalelong
from scalelong.models import UViT

RATES = (2e-3, 4e-3, 8e-3)
STEPS = 40


class Loop:
    """A loop whose runs fail above 0.003 unscaled and above 0.009 with CS, a little more or less for each seed."""

    def __init__(self, *, ends: float = 1.0, breaks_at: int | None = None) -> None:
        self.runs: list[tuple[str, float, int]] = []
        self.yielded = 0
        self.ends, self.breaks_at = ends, breaks_at

    def __call__(self, scale: Callable[[nn.Module], nn.Module], lr: float, seed: int) -> Iterator[float]:
        if len(self.runs) == self.breaks_at:
            raise KeyboardInterrupt
        model = UViT(img_size=8, embed_dim=16, depth=4, num_heads=2)
        assert scale(model) is model
        scaled = hasattr(model, "skip_scaling")
        self.runs.append(("cs" if scaled else "none", lr, seed))
        survives = lr < (0.009 if scaled else 0.003) * 1.1**seed
        for step in range(STEPS):
            self.yielded += 1
            yield 1 / (1 + step) + 0.1 if survives else self.ends


def find(loop: Callable[..., Any], **options: Any) -> Any:
    return scalelong.find_edge(loop, **{"lrs": RATES, "methods": ["none", "cs:kappa=0.5"], "seeds": 4, **options})


def test_it_finds_each_edge_and_says_what_to_train_with() -> None:
    loop = Loop()
    found = find(loop)
    none, cs = found.methods
    assert none["edge"]["low"] < 0.003 * 1.1**1.5 < none["edge"]["high"]
    assert cs["ratio"]["value"] == pytest.approx(3, rel=0.1) and cs["ratio"]["verdict"] == "larger"
    assert found.advice.startswith("Train with CS κ=0.5 at 0.005") and "half of its edge for 40 steps" in found.advice
    assert str(found).splitlines() == [f"- {none['sentence']}", f"- {cs['sentence']}", found.advice]
    assert len(set(loop.runs)) == len(loop.runs), "no run is made twice"
    assert {rate for method, rate, _ in loop.runs if method == "cs"} > set(RATES)


@pytest.mark.parametrize("ends", [1.0, math.nan])
def test_a_run_that_has_clearly_failed_is_stopped(ends: float) -> None:
    loop = Loop(ends=ends)
    found = find(loop)
    failed = sum(found_of["seeds"] * len(found_of["rates"]) - sum(found_of["survived"]) for found_of in found.methods)
    needed = {1.0: STEPS // 2}.get(ends, 1)
    assert failed > 5 and loop.yielded == (len(loop.runs) - failed) * STEPS + failed * needed


def test_interrupted_it_resumes_from_its_file_and_makes_no_run_twice(tmp_path: Path) -> None:
    whole, file = find(Loop()), tmp_path / "folder" / "edge.json"
    first, second = Loop(breaks_at=17), Loop()
    with pytest.raises(KeyboardInterrupt):
        find(first, file=file)
    assert find(second, file=file) == whole
    assert not set(first.runs) & set(second.runs)
    json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    third = Loop()
    assert find(third, file=file) == whole and third.runs == []
    assert find(Loop(), file=file, seeds=5).methods[0]["seeds"] == 5, "more seeds extend it"
    with pytest.raises(ValueError, match="name another file"):
        find(Loop(), file=file, must_gain=0.3)


def test_losses_that_are_not_finite_are_kept_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "edge.json"
    found = find(Loop(ends=math.inf), file=file)
    again = Loop()
    assert find(again, file=file) == found and again.runs == []


def test_a_loop_may_return_its_losses_and_must_return_some() -> None:
    assert find(lambda scale, lr, seed: list(Loop()(scale, lr, seed))).advice == find(Loop()).advice
    with pytest.raises(ValueError, match="train returned no losses for lr 0.002, seed 0"):
        find(lambda scale, lr, seed: [])


@pytest.mark.parametrize("options", [{"lrs": [1e-3]}, {"lrs": [1e-3, 1e-3]}, {"seeds": 0}, {"methods": []}])
def test_what_makes_no_search_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="two learning rates, a seed and a method at least"):
        find(Loop(), **options)


def test_a_network_that_predicts_another_target_has_its_own_loss_of_predicting_nothing() -> None:
    loop = Loop(ends=1.0)
    found = find(loop, nothing=4.0)
    assert found.methods[0]["edge"]["value"] is None and "survive even the highest rate" in found.methods[0]["sentence"]


def test_the_package_has_no_other_names_that_are_imported_late() -> None:
    assert callable(scalelong.find_edge) and "find_edge" in scalelong.__all__
    with pytest.raises(AttributeError, match="no attribute 'find_edges'"):
        _ = scalelong.find_edges  # type: ignore[attr-defined]
