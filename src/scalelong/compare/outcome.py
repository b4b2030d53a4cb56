"""How a run of a comparison ended, and what is measured once it has: kept in a small file in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import Config, build_model
from ..monitor.readings import with_nulls
from ..runs import Run, read_metrics
from ..runs.model import load_network
from ..training.validation import Validation, open_validation
from ..utils.atomic import Files, atomic_write, to_json
from ..utils.rng import keyed_generator

FILE = "outcome.json"

SIGMAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Standard deviations of the extra noise; images lie in [−1, 1]."""

FAR_ABOVE = 2.0
"""A final loss of so many times the untrained network's is a divergence, even if every number is finite."""


@dataclass(frozen=True)
class Outcome:
    """A run that came to its end; `noise_losses` are validation losses with extra noise of `SIGMAS` in the input."""

    status: Literal["finished", "diverged"]
    step: int
    message: str | None = None
    initial_loss: float | None = None
    noise_losses: tuple[float | None, ...] | None = None


class Disturbed(nn.Module):
    """A network whose input gets Gaussian noise of its own: x_t' = x_t + σ·δ (the paper's Section 3.3)."""

    def __init__(self, network: nn.Module, sigma: float, seed: int) -> None:
        super().__init__()
        self.network, self.sigma = network, sigma
        self.generator = keyed_generator(seed, "extra noise", 0)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        extra = torch.randn(x.shape, generator=self.generator).to(x)
        return self.network(x + self.sigma * extra, *args, **kwargs)


def judge(folder: Path, config: Config) -> Outcome:
    """The outcome of a run that reached its last step."""
    validation = open_validation(config)
    initial = untrained_loss(config, validation)
    final = last_losses(folder)
    worst = max(final, key=lambda loss: math.inf if math.isnan(loss) else loss, default=math.nan)
    if not worst <= FAR_ABOVE * initial:
        message = f"final validation loss {worst:.4g}, untrained {initial:.4g}"
        return Outcome("diverged", config.training.steps, message, initial)
    return Outcome("finished", config.training.steps, None, initial, noise_losses(folder, config, validation))


def broken(config: Config, step: int, message: str) -> Outcome:
    """The outcome of a run that the guard gave up."""
    return Outcome("diverged", step, message, untrained_loss(config, open_validation(config)))


def untrained_loss(config: Config, validation: Validation) -> float:
    return validation.loss(build_model(config).to(validation.device))


def noise_losses(
    folder: Path, config: Config, validation: Validation, sigmas: Sequence[float] = SIGMAS
) -> tuple[float, ...]:
    """The validation loss of the EMA weights when the noised images get extra noise; the same δ for every σ."""
    checkpoint = Run(folder).checkpoints().latest()
    assert checkpoint is not None, "a run that ended has a checkpoint"
    network = load_network(config, checkpoint, "ema")
    return tuple(validation.loss(Disturbed(network, sigma, config.seed)) for sigma in sigmas)


def last_losses(folder: Path) -> list[float]:
    """The last validation losses, of the weights and of their average."""
    lines = [line for line in read_metrics(Run(folder).metrics.path) if "validation_loss" in line]
    return [float(lines[-1][key]) for key in ("validation_loss", "validation_loss_ema")] if lines else []


def write_outcome(folder: Path, outcome: Outcome) -> None:
    content = to_json(with_nulls(asdict(outcome)))
    atomic_write(folder / FILE, lambda temporary: Files().write_bytes(temporary, content))


def read_outcome(folder: Path) -> Outcome | None:
    """None for a run that has not come to its end."""
    try:
        content = json.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        return None
    noise = content.pop("noise_losses")
    return Outcome(**content, noise_losses=None if noise is None else tuple(noise))
