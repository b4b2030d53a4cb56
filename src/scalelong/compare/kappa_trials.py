"""Short matched runs over the band: which κ denoises validation images best, with the error of that comparison.

Runs differ in κ only: the same first weights, batches, times and noise. After each round the better half is trained
twice as long. Early steps mislead: in the paper's Table 4 the reversed CS leads after 5,000 steps (FID 67 against 85)
and is far behind at the end (12.3 against 6.7).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..config.schema import ScalingConfig
from ..guard.nonfinite import TrainingDiverged
from ..kappa.advisor import DECIMALS, KappaBand
from ..kappa.recipe import open_validation
from ..monitor.readings import with_nulls
from ..runs import Run, RunError, find_start
from ..runs.model import load_network
from ..training import Display, train
from ..training.validation import Validation
from .folder import write_json
from .grid import only_training

WARNING = (
    "early steps mislead: in the paper's Table 4 the reversed scaling leads after 5,000 steps and is far behind at "
    "45,000. Take the probe for a hint, and longer runs for an answer."
)

CLEAR = 2.0
"""A difference of so many standard errors counts."""


@dataclass(frozen=True)
class Score:
    """A run's validation loss, and how far it is above the best of its round on the same images, times and noise.

    Both are infinite for a run that diverged.
    """

    kappa: float
    steps: int
    loss: float
    standard_error: float
    behind: float
    behind_error: float

    @property
    def diverged(self) -> bool:
        return math.isinf(self.loss)

    @property
    def clearly_behind(self) -> bool:
        return self.behind > CLEAR * self.behind_error


@dataclass(frozen=True)
class Probe:
    """The scores of every round, each best first."""

    rounds: tuple[tuple[Score, ...], ...]

    @property
    def best(self) -> float:
        return self.rounds[-1][0].kappa

    @property
    def steps(self) -> int:
        """How far the last round went."""
        return self.rounds[-1][0].steps

    @property
    def decided(self) -> bool:
        """Whether the best of the last round is clearly ahead of all others in it."""
        return all(score.clearly_behind for score in self.rounds[-1][1:])

    def summary(self) -> dict[str, Any]:
        """As JSON has it, which has no number for what diverged."""
        rounds = [[with_nulls(asdict(score)) for score in scores] for scores in self.rounds]
        return {"best": self.best, "decided": self.decided, "rounds": rounds}

    def rules_out(self, kappa: float) -> bool:
        """Whether a value was tried and was clearly behind in the last round that it was in."""
        last = next((score for scores in reversed(self.rounds) for score in scores if score.kappa == kappa), None)
        return last is not None and last.clearly_behind


def probe_kappas(
    config: Config,
    kappas: Sequence[float],
    folder: Path,
    *,
    where: str = "input",
    steps: int | None = None,
    display: Display | None = None,
) -> Probe:
    """Train the recipe with CS for each κ, first `steps` long (a twentieth of the recipe's), and halve the field.

    The runs are in folders of their own below `folder`; a probe that was stopped or killed is resumed.
    """
    steps = steps or max(1, config.training.steps // 20)
    validation, rounds, alive = open_validation(config), [], list(dict.fromkeys(kappas))
    while True:
        trials = {kappa: variant(config, kappa, where, steps) for kappa in alive}
        losses = {kappa: trial_losses(trial, folder, validation, display) for kappa, trial in trials.items()}
        rounds.append(tuple(score(losses, steps)))
        better = better_half(rounds[-1])
        if len(alive) <= 2 or len(better) == 1:
            return Probe(tuple(rounds))
        alive, steps = better, 2 * steps


def better_half(scores: Sequence[Score]) -> list[float]:
    """The κ of the next round; none that diverged."""
    better = [score.kappa for score in scores[: math.ceil(len(scores) / 2)] if not score.diverged]
    if not better:
        tried = ", ".join(str(score.kappa) for score in scores)
        raise TrainingDiverged(
            f"every κ of the probe diverged ({tried}) within {scores[0].steps} steps: the recipe does not train with "
            "any of them. Lower optim.lr, or raise optim.warmup_steps."
        )
    return better


def spread_over(band: KappaBand, recommended: float, count: int = 4) -> list[float]:
    """Values over the band, its ends included, and the recommended one in place of its nearest."""
    low, high = max(band.low, 0.1), max(band.high, 0.1)
    even = [low + (high - low) * i / (count - 1) for i in range(count)]
    even[min(range(count), key=lambda i: abs(even[i] - recommended))] = recommended
    return list(dict.fromkeys(round(kappa, DECIMALS) for kappa in even))


def variant(config: Config, kappa: float, where: str, steps: int) -> Config:
    """The recipe with CS and that κ, so many steps long, and nothing else on the way."""
    scaling = ScalingConfig.model_validate({"method": "cs", "kappa": kappa, "where": where})
    return only_training(config.model_copy(update={"scaling": scaling}), steps)


def trial_losses(config: Config, folder: Path, validation: Validation, display: Display | None) -> Tensor:
    """Train one variant, and keep the loss of each validation image beside the run. Shape: (images,), float64."""
    kappa, steps = config.scaling.kappa, config.training.steps
    run = Run(folder / f"kappa-{kappa}")
    start, file = find_start(run, config), run.folder / f"validation-{steps}.json"
    # A run is resumed from round to round: what it was in an earlier one is in this file only.
    if not file.exists():
        if start.step > steps:
            raise RunError(f"{run.folder} is at step {start.step}, beyond {steps}: give the probe another --out")
        if display is not None:
            display.note(f"probe: κ = {kappa}, steps {start.step} to {steps}")
        write_json(file, train_trial(config, run, validation, display))
    found = json.loads(file.read_bytes())
    # Nothing is kept of a run that diverged, which counts as an infinite loss.
    return torch.tensor([math.inf] * len(validation.data) if found is None else found, dtype=torch.float64)


def train_trial(config: Config, run: Run, validation: Validation, display: Display | None) -> list[float] | None:
    """The losses with raw weights, because EMA weights lag in a short run; None if it diverged."""
    try:
        stopped = train(config, run.folder, display=display).signal is not None
    except TrainingDiverged as error:
        if display is not None:
            display.note(f"probe: κ = {config.scaling.kappa}: {error}")
        return None
    if stopped:
        raise KeyboardInterrupt
    checkpoint = run.checkpoints().latest()
    assert checkpoint is not None, "a finished run has a checkpoint"
    model = load_network(config, checkpoint, "raw")
    validation.device = next(model.parameters()).device
    found = validation.losses(model, torch.arange(len(validation.data)))
    return found.tolist() if found.isfinite().all() else None


def score(losses: dict[float, Tensor], steps: int) -> list[Score]:
    """Best first. Shape: (images,) for each κ."""
    ranked = sorted(losses, key=lambda kappa: losses[kappa].mean().item())
    best = losses[ranked[0]]
    return [
        Score(kappa, steps, *mean_and_error(losses[kappa]), *mean_and_error(losses[kappa] - best)) for kappa in ranked
    ]


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Without an error where the values are infinite, as of a run that diverged."""
    if not values.isfinite().all():
        return math.inf, 0.0
    return values.mean().item(), values.std().item() / math.sqrt(len(values))
