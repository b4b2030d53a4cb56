"""How a run of a comparison ended, and what is measured once it has: kept in a small file in its folder."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import Config, build_model
from ..runs import Run, read_metrics
from ..runs.model import load_network
from ..training.validation import Validation, open_validation
from ..utils.process import keyed_generator
from .folder import write_json

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


class NoisyInput(nn.Module):
    """A network whose input gets Gaussian noise of its own: x_t' = x_t + σ·δ (the paper's Section 3.3)."""

    def __init__(self, network: nn.Module, sigma: float, seed: int) -> None:
        super().__init__()
        self.network, self.sigma = network, sigma
        self.generator = keyed_generator(seed, "extra noise", 0)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        extra = torch.randn(x.shape, generator=self.generator).to(x)
        return self.network(x + self.sigma * extra, *args, **kwargs)


def measure_outcome(folder: Path, config: Config, diverged: str | None = None) -> Outcome:
    """The outcome of a run that reached its last step, or that the guard gave up for the reason `diverged`."""
    validation = open_validation(config)
    initial = validation.loss(build_model(config).to(validation.device))
    if diverged is not None:
        return Outcome("diverged", Run(folder).metrics.last_step(), diverged, initial)
    worst = last_loss(folder)
    if not worst <= FAR_ABOVE * initial:
        message = f"final validation loss {worst:.4g}, untrained {initial:.4g}"
        return Outcome("diverged", config.training.steps, message, initial)
    return Outcome("finished", config.training.steps, None, initial, noise_losses(folder, config, validation))


def noise_losses(folder: Path, config: Config, validation: Validation) -> tuple[float, ...]:
    """The validation loss of the EMA weights when the noised images get extra noise; the same δ for every σ."""
    checkpoint = Run(folder).checkpoints().latest()
    assert checkpoint is not None, "a run that ended has a checkpoint"
    network = load_network(config, checkpoint, "ema")
    return tuple(validation.loss(NoisyInput(network, sigma, config.seed)) for sigma in SIGMAS)


def last_loss(folder: Path) -> float:
    """The larger of the last validation losses of the weights and of their EMA; NaN if one of them is."""
    lines = [line for line in read_metrics(Run(folder).metrics.path) if "validation_loss" in line]
    found = [float(lines[-1][key]) for key in ("validation_loss", "validation_loss_ema")] if lines else [math.nan]
    return math.nan if any(map(math.isnan, found)) else max(found)


def write_outcome(folder: Path, outcome: Outcome) -> None:
    write_json(folder / FILE, asdict(outcome))


def read_outcome(folder: Path) -> Outcome | None:
    """None for a run that has not come to its end."""
    try:
        content = json.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        return None
    noise = content.pop("noise_losses")
    return Outcome(**content, noise_losses=None if noise is None else tuple(noise))
