"""Short matched runs over the band: which κ denoises validation images best, with the error of that comparison.

Runs differ in κ only: the same first weights, batches, times and noise. After each round the better half goes on,
twice as long. Early steps mislead: in the paper's Table 4 the reversed CS leads after 5,000 steps (FID 67 against 85)
and is far behind at the end (12.3 against 6.7).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..guard.nonfinite import TrainingDiverged
from ..kappa.advisor import DECIMALS, KappaAdvice, KappaBand
from ..monitor.readings import with_nulls
from ..runs import Run, RunError, find_start
from ..runs.model import load_network
from ..training import Display, train
from ..training.validation import open_validation
from ..utils.atomic import Files, atomic_write, to_json

WARNING = (
    "early steps mislead: in the paper's Table 4 the reversed scaling leads after 5,000 steps and is far behind at "
    "45,000. Take the probe for a hint, and longer runs for an answer."
)

# A difference of so many standard errors counts.
CLEAR = 2.0


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

    The runs are in folders of their own below `folder`, and a probe that was stopped, or killed, goes on.
    """
    steps = steps or max(1, config.training.steps // 20)
    judge, rounds, alive = Judge(config, folder, display), [], list(dict.fromkeys(kappas))
    while True:
        losses = {kappa: judge.losses(variant(config, kappa, where, steps)) for kappa in alive}
        rounds.append(tuple(score(losses, steps)))
        better = better_half(rounds[-1])
        if len(alive) <= 2 or len(better) == 1:
            return Probe(tuple(rounds))
        alive, steps = better, 2 * steps


def better_half(scores: Sequence[Score]) -> list[float]:
    """The κ that go on to the next round; none that diverged."""
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
    resolved = config.model_dump(mode="json")
    resolved["scaling"] = {"method": "cs", "kappa": kappa, "where": where}
    resolved["training"] |= {"steps": steps, "validate_every": None, "sample_every": None}
    resolved["training"] |= {"checkpoint_every": steps, "keep_last": 1}
    return Config.model_validate(resolved, strict=False)


class Judge:
    """Trains one variant after another and gives the loss of each validation image, which it keeps beside the run."""

    def __init__(self, config: Config, folder: Path, display: Display | None) -> None:
        self.validation = open_validation(config)
        self.folder, self.display = folder, display

    def losses(self, config: Config) -> Tensor:
        """Shape: (validation images,), float64."""
        kappa, steps = config.scaling.kappa, config.training.steps
        run = Run(self.folder / f"kappa-{kappa}")
        start, kept = find_start(run, config), run.folder / f"validation-{steps}.json"
        # A run goes on from round to round: what it was in an earlier one is in this file only.
        if kept.exists():
            return self._as_losses(json.loads(kept.read_text(encoding="utf-8")))
        if start.step > steps:
            raise RunError(f"{run.folder} is at step {start.step}, beyond {steps}: give the probe another --out")
        if self.display is not None:
            self.display.note(f"probe: κ = {kappa}, steps {start.step} to {steps}")
        found = self._trained(config, run)
        atomic_write(kept, lambda path: Files().write_bytes(path, to_json(found)))
        return self._as_losses(found)

    def _as_losses(self, found: list[float] | None) -> Tensor:
        """As the file has them: nothing of a run that diverged, which counts as an infinite loss."""
        if found is None:
            return torch.full((len(self.validation.data),), torch.inf, dtype=torch.float64)
        return torch.tensor(found, dtype=torch.float64)

    def _trained(self, config: Config, run: Run) -> list[float] | None:
        """The losses of the last weights, because averaged ones lag in a short run; None if it diverged."""
        try:
            stopped = train(config, run.folder, display=self.display).signal is not None
        except TrainingDiverged as error:
            if self.display is not None:
                self.display.note(f"probe: κ = {config.scaling.kappa}: {error}")
            return None
        if stopped:
            raise KeyboardInterrupt
        checkpoint = run.checkpoints().latest()
        assert checkpoint is not None, "a finished run has a checkpoint"
        model = load_network(config, checkpoint, "raw")
        self.validation.device = next(model.parameters()).device
        found = self.validation.losses(model, torch.arange(len(self.validation.data)))
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


def after_probe(advice: KappaAdvice, probe: Probe, *, warmup_steps: int = 0) -> KappaAdvice:
    """The advice once runs were compared: κ stays unless it was clearly behind the probe's best.

    A probe that ends within the warm-up, at learning rates far below the recipe's, decides nothing.
    """
    kappa = advice.kappa
    if probe.steps <= warmup_steps:
        reason = f"The probe's {probe.steps} steps lie within the warm-up of {warmup_steps}: it decides nothing."
    elif not probe.rules_out(kappa):
        reason = f"In the probe κ = {kappa} was not clearly behind any other value."
    else:
        kappa = probe.best
        reason = f"In the probe κ = {advice.kappa} was clearly behind κ = {kappa}, which is recommended instead."
    return replace(advice, kappa=kappa, reasons=(*advice.reasons, reason))
