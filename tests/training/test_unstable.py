"""A deep U-ViT with a rate that is far too high and no clipping: the run says its state, and which block grew."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import run, sets
from run_cases import lasting_metrics, losses

DEEP = (
    *("model.depth=12", "model.embed_dim=32", "model.num_heads=2", "data.validation_count=10", "seed=1"),
    *("diffusion.prediction=epsilon", "scaling.method=none", "scaling.kappa=null", "optim.clip_norm=null"),
    *("training.batch_size=16", "training.steps=32", "training.log_every=1", "training.validate_every=null"),
    *("training.sample_every=null", "training.monitor_every=1", "optim.warmup_steps=8"),
)
SENTENCE = re.compile(r"(growing|failing) since step \d+[,:] .* in (\S+), whose features are × \S+ of the first ones.*")


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    events: list[dict[str, Any]]
    said: list[str]
    """The lines of the console that speak of a state."""


def train(out: Path, rate: float) -> Trained:
    """`scalelong train digits --set …`, as a user runs it."""
    result = run("train", "digits", *sets(*DEEP, f"optim.lr={rate}"), "--out", out)
    assert result.exit_code == 0, result.output
    events = [line for line in lasting_metrics(out) if line.get("event") == "state"]
    return Trained(losses(out), events, [line for line in result.stdout.splitlines() if " since step " in line])


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("healthy") / "run", 2e-3)


def test_a_healthy_run_is_steady(healthy: Trained) -> None:
    assert healthy.losses[-1] < 0.85 * healthy.losses[0]
    assert healthy.events == [] and healthy.said == []


def test_a_rate_too_high_is_told_in_one_sentence_on_the_console_and_in_the_log(
    healthy: Trained, tmp_path: Path
) -> None:
    wild = train(tmp_path / "run", 0.1)
    # Predicting nothing at all has a loss of 1.
    assert sum(wild.losses[-8:]) / 8 > 0.9 > 1.1 * sum(healthy.losses[-8:]) / 8
    event = wild.events[0]
    match = SENTENCE.fullmatch(event["message"])
    assert match is not None, event["message"]
    assert (match[1], match[2].rstrip(",")) == (event["state"], event["block"])
    assert [event["message"] in line for event, line in zip(wild.events, wild.said, strict=True)] == [True] * len(
        wild.said
    )
