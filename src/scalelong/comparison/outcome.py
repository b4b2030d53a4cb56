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

from ..data import keyed_generator
from ..files import Files, to_json, write_whole
from ..recipes import Config, build_model
from ..runs import Run, read_metrics
from ..runs.network import load_network
from ..stability.readings import with_nulls
from ..stability.recipe import open_heldout
from ..training.heldout import HeldOut

FILE = "outcome.json"

SIGMAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Standard deviations of the extra noise; images lie in [−1, 1]."""

FAR_ABOVE = 2.0
"""A final loss of so many times the untrained network's is a divergence, even if every number is finite."""


@dataclass(frozen=True)
class Outcome:
    """A run that came to its end; `noise_losses` are held-out losses with extra noise of `SIGMAS` in the input."""

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
    heldout = open_heldout(config)
    initial = untrained_loss(config, heldout)
    final = last_losses(folder)
    worst = max(final, key=lambda loss: math.inf if math.isnan(loss) else loss, default=math.nan)
    if not worst <= FAR_ABOVE * initial:
        message = f"final held-out loss {worst:.4g}, untrained {initial:.4g}"
        return Outcome("diverged", config.training.steps, message, initial)
    return Outcome("finished", config.training.steps, None, initial, noise_losses(folder, config, heldout))


def broken(config: Config, step: int, message: str) -> Outcome:
    """The outcome of a run that the guard gave up."""
    return Outcome("diverged", step, message, untrained_loss(config, open_heldout(config)))


def untrained_loss(config: Config, heldout: HeldOut) -> float:
    return heldout.loss(build_model(config).to(heldout.device))


def noise_losses(folder: Path, config: Config, heldout: HeldOut, sigmas: Sequence[float] = SIGMAS) -> tuple[float, ...]:
    """The held-out loss of the averaged weights when the noised images get extra noise; the same δ for every σ."""
    checkpoint = Run(folder).checkpoints().latest()
    assert checkpoint is not None, "a run that ended has a checkpoint"
    network = load_network(config, checkpoint, "ema")
    return tuple(heldout.loss(Disturbed(network, sigma, config.seed)) for sigma in sigmas)


def last_losses(folder: Path) -> list[float]:
    """The last held-out losses, of the weights and of their average."""
    lines = [line for line in read_metrics(Run(folder).metrics.path) if "heldout_loss" in line]
    return [float(lines[-1][key]) for key in ("heldout_loss", "heldout_loss_ema")] if lines else []


def write_outcome(folder: Path, outcome: Outcome) -> None:
    content = to_json(with_nulls(asdict(outcome)))
    write_whole(folder / FILE, lambda temporary: Files().write_bytes(temporary, content))


def read_outcome(folder: Path) -> Outcome | None:
    """None for a run that has not come to its end."""
    try:
        content = json.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        return None
    noise = content.pop("noise_losses")
    return Outcome(**content, noise_losses=None if noise is None else tuple(noise))
