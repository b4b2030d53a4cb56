"""Everything that a run's next step depends on, to a checkpoint and back to the bit.

Batches in memory, times, noise and the learning rate are functions of the step, so they need no state of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..guard.nonfinite import Guard, Spike, SpikeDetector
from ..runs.checkpoint import Checkpoint, CheckpointStore
from ..runs.run_dir import RunError
from .ema import EMA
from .flatten import Flat, flatten_optimizer, parameter_names, restore_optimizer
from .sharding import gather, scatter


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
    evaluated: int = 0
    """The last step whose drawn images were evaluated."""

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
        optimizer, _ = self._flat_optimizer()
        parts = {"model": self.network.state_dict(), "ema": self.ema.state_dict(), "optimizer": optimizer}
        return {group: gather(tensors, keep) for group, tensors in parts.items()}

    def save(
        self,
        store: CheckpointStore,
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        metrics_size: int,
        metric: float | None = None,
        monitor: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint."""
        state = {
            "step": self.step,
            "offset": self.offset,
            "loss_sum": self.loss_sum,
            "loss_count": self.loss_count,
            "evaluated": self.evaluated,
            "metrics_size": metrics_size,
            "monitor": monitor,
            "ema_step": self.ema.step,
            "guard": self.guard.state_dict(),
            "spikes": self.spikes.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "optimizer": self._flat_optimizer()[1],
        }
        return store.save(self.step, tensors, state, metric)

    def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Continue as if the run had never stopped; returns the rest of what was saved, as `metrics_size`."""
        state = self._load_training(checkpoint)
        self.offset = state["offset"]
        self.guard.load_state_dict(state["guard"])
        return state

    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Take back the weights and go on with batches that come after those seen.

        The guard keeps counting, and the same batches are not tried again: they would do the same again.
        """
        next_batch = self.step + self.offset
        self._load_training(checkpoint)
        self.offset = next_batch - self.step

    def _flat_optimizer(self) -> Flat:
        return flatten_optimizer(self.optimizer.state_dict(), parameter_names(self.network, self.optimizer))

    def _load_training(self, checkpoint: Checkpoint) -> dict[str, Any]:
        state, weights, own = checkpoint.state(), checkpoint.tensors("model"), self.network.state_dict()
        refuse_other_network(checkpoint.path, weights, own)
        self.network.load_state_dict(scatter(weights, own))
        self.ema.load_state_dict(scatter(checkpoint.tensors("ema"), self.ema.state_dict()), step=state["ema_step"])
        moments, parameters = checkpoint.tensors("optimizer"), dict(self.network.named_parameters())
        # A slot is called `parameter.slot`, and is cut like its parameter.
        like = {key: parameters[name] for key in moments if (name := key.rpartition(".")[0]) in parameters}
        restore_optimizer(self.optimizer, self.network, scatter(moments, like), state["optimizer"])
        self.spikes.load_state_dict(state["spikes"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.loss_sum, self.loss_count = state["step"], state["loss_sum"], state["loss_count"]
        self.evaluated = state.get("evaluated", 0)  # Older checkpoints have none.
        return state


def refuse_other_network(path: Path, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise if saved weights are those of another network; the first that differs says in what."""
    theirs, ours = ({name: tuple(tensor.shape) for name, tensor in weights.items()} for weights in (saved, own))
    name = next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None)
    if name is not None:
        raise RunError(
            f"{path} holds another network than the recipe's: {name} is {theirs.get(name, 'absent')} there and "
            f"{ours.get(name, 'absent')} here. Give the model and scaling settings of the run that it comes from."
        )
