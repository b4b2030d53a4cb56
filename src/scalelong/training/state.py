"""Everything that a run's next step depends on, to a checkpoint and back to the bit.

Batches, times, noise and the learning rate are functions of the step, so they need no state of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..guard.nonfinite import Spike, SpikeDetector
from ..runs.checkpoint import Checkpoint
from ..runs.run_dir import RunError
from .ema import EMA
from .optim import flatten_optimizer, parameter_names, restore_optimizer
from .parallel import gather_tensors, scatter_tensors

FORMAT = 2
"""Of what a checkpoint says besides its tensors."""

COUNTS = ("step", "batch_offset", "skipped", "rollbacks", "loss_sum", "loss_count", "evaluated")


@dataclass
class TrainState:
    """The parts of a run that change, and how far it is."""

    network: nn.Module
    optimizer: Optimizer
    ema: EMA
    scaler: Any = None
    """The gradient scaler of fp16, or None."""
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    step: int = 0
    """Steps done."""
    batch_offset: int = 0
    """Batches left out by rollbacks: step k takes batch k + batch_offset."""
    skipped: int = 0
    """Non-finite steps in a row up to now."""
    rollbacks: int = 0
    loss_sum: float = 0.0
    """Losses since the last logged step, and how many they are."""
    loss_count: int = 0
    evaluated: int = 0
    """The last step whose samples were evaluated."""

    def add_loss(self, loss: float) -> Spike | None:
        """Keep the loss of the last step for the log; returns a spike if it is one."""
        self.loss_sum, self.loss_count = self.loss_sum + loss, self.loss_count + 1
        return self.spikes.update(self.step, loss)

    def take_mean_loss(self) -> float:
        """The mean of the losses since it was last taken, NaN if there are none."""
        mean = self.loss_sum / self.loss_count if self.loss_count else math.nan
        self.loss_sum, self.loss_count = 0.0, 0
        return mean

    def tensors(self, keep: bool = True) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds, whole; shards are gathered by all processes, and those that `keep` get it."""
        parts = {"model": self.network.state_dict(), "ema": self.ema.state_dict(), "optimizer": self._optimizer()[0]}
        return {group: gather_tensors(tensors, keep) for group, tensors in parts.items()}

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint says besides its tensors."""
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in COUNTS},
            "ema_step": self.ema.step,
            "spikes": self.spikes.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "optimizer": self._optimizer()[1],
        }

    def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Continue as if the run had never stopped; returns all that the checkpoint says."""
        saved = self._load_training(checkpoint)
        for name in COUNTS:
            setattr(self, name, saved[name])
        return saved

    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Take back the weights, and continue with batches that come after those seen.

        The counts of what went wrong stay, and the same batches are not tried again: they would do the same again.
        """
        next_batch = self.step + self.batch_offset
        saved = self._load_training(checkpoint)
        for name in ("step", "loss_sum", "loss_count", "evaluated"):
            setattr(self, name, saved[name])
        self.batch_offset = next_batch - self.step
        self.skipped = 0

    def _optimizer(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return flatten_optimizer(self.optimizer.state_dict(), parameter_names(self.network, self.optimizer))

    def _load_training(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Weights, EMA, optimiser and scaler of a checkpoint; returns what else it says."""
        saved, weights, own = checkpoint.state(), checkpoint.tensors("model"), self.network.state_dict()
        if saved.get("format") != FORMAT:
            raise RunError(f"{checkpoint.path} was written by another version of scalelong: train anew with this one")
        refuse_other_network(checkpoint.path, weights, own)
        self.network.load_state_dict(scatter_tensors(weights, own))
        averages = scatter_tensors(checkpoint.tensors("ema"), self.ema.state_dict())
        self.ema.load_state_dict(averages, step=saved["ema_step"])
        moments, parameters = checkpoint.tensors("optimizer"), dict(self.network.named_parameters())
        # A slot is called `parameter.slot`, and is cut like its parameter.
        like = {key: parameters[name] for key in moments if (name := key.rpartition(".")[0]) in parameters}
        restore_optimizer(self.optimizer, self.network, scatter_tensors(moments, like), saved["optimizer"])
        self.spikes.load_state_dict(saved["spikes"])
        if self.scaler is not None and saved["scaler"] is not None:
            self.scaler.load_state_dict(saved["scaler"])
        return saved


def refuse_other_network(path: Path, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise if saved weights are those of another network; the first that differs says in what."""
    theirs, ours = ({name: tuple(tensor.shape) for name, tensor in weights.items()} for weights in (saved, own))
    name = next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None)
    if name is not None:
        raise RunError(
            f"{path} holds another network than the recipe's: {name} is {theirs.get(name, 'absent')} there and "
            f"{ours.get(name, 'absent')} here. Give the model and scaling settings of the run that it comes from."
        )
