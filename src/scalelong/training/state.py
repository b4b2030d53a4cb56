"""Everything that a run's next step depends on, to a checkpoint and back to the bit.

Batches, times, noise and the learning rate are functions of the step, so they need no state of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .checkpoint import Checkpoint, CheckpointStore
from .ema import EMA
from .flatten import flatten_optimizer, parameter_names, restore_optimizer
from .guard import Guard, SpikeDetector


@dataclass
class TrainState:
    """The parts of a run that change, and how far it is."""

    network: nn.Module
    optimizer: Optimizer
    ema: EMA
    guard: Guard
    scaler: Any = None
    """The gradient scaler of fp16, or None."""
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    step: int = 0
    """Steps done."""
    offset: int = 0
    """Batches left out by rollbacks: step k takes batch k + offset."""
    loss_sum: float = 0.0
    """Losses since the last logged step, and how many they are."""
    loss_count: int = 0

    def save(self, store: CheckpointStore, *, metrics_size: int, metric: float | None = None) -> Path:
        optimizer, settings = flatten_optimizer(
            self.optimizer.state_dict(), parameter_names(self.network, self.optimizer)
        )
        tensors = {"model": self.network.state_dict(), "ema": self.ema.state_dict(), "optimizer": optimizer}
        state = {
            "step": self.step,
            "offset": self.offset,
            "loss_sum": self.loss_sum,
            "loss_count": self.loss_count,
            "metrics_size": metrics_size,
            "ema_step": self.ema.step,
            "guard": self.guard.state_dict(),
            "spikes": self.spikes.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "optimizer": settings,
        }
        return store.save(self.step, tensors, state, metric)

    def load(self, checkpoint: Checkpoint) -> int:
        """Continue as if the run had never stopped; returns the size that metrics.jsonl had."""
        state = self._load_training(checkpoint)
        self.offset = state["offset"]
        self.guard.load_state_dict(state["guard"])
        return state["metrics_size"]

    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Take back the weights and go on with batches that come after those seen.

        The guard keeps counting, and the same batches are not tried again: they would do the same again.
        """
        next_batch = self.step + self.offset
        self._load_training(checkpoint)
        self.offset = next_batch - self.step

    def _load_training(self, checkpoint: Checkpoint) -> dict[str, Any]:
        state = checkpoint.state()
        self.network.load_state_dict(checkpoint.tensors("model"))
        self.ema.load_state_dict(checkpoint.tensors("ema"), step=state["ema_step"])
        restore_optimizer(self.optimizer, self.network, checkpoint.tensors("optimizer"), state["optimizer"])
        self.spikes.load_state_dict(state["spikes"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.loss_sum, self.loss_count = state["step"], state["loss_sum"], state["loss_count"]
        return state
