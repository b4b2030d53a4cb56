"""Everything that a run's next step depends on, to a checkpoint and back to the bit; the optimiser and its rate.

Batches, times, noise and the learning rate are functions of the step, so they need no state of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..config.sections import OptimConfig
from ..guard.nonfinite import Spike, SpikeDetector
from ..runs.checkpoint import Checkpoint
from ..runs.run_dir import RunError
from .clip import AdaptiveClip
from .ema import EMA
from .parallel import gather_tensors, scatter_tensors

# The devices whose AdamW is one kernel in every supported version of torch.
FUSED = {"cuda", "cpu", "xpu"}

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
    clip: AdaptiveClip | None = None
    """What clips each tensor's gradient by itself, with its averages."""
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
        moments = moments_of(self.optimizer, self.network)
        parts = {"model": self.network.state_dict(), "ema": self.ema.state_dict(), "optimizer": moments}
        return {group: gather_tensors(tensors, keep) for group, tensors in parts.items()}

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint says besides its tensors."""
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in COUNTS},
            "ema_step": self.ema.step,
            "spikes": self.spikes.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            **({} if self.clip is None else {"clip": self.clip.state_dict()}),
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

    def _load_training(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Weights, EMA, optimiser and scaler of a checkpoint; returns what else it says."""
        saved, weights, own = checkpoint.state(), checkpoint.tensors("model"), self.network.state_dict()
        if saved.get("format") != FORMAT:
            raise RunError(f"{checkpoint.path} was written by another version of scalelong: train anew with this one")
        check_kinds(checkpoint, saved)
        refuse_other_network(checkpoint.path, weights, own)
        self.network.load_state_dict(scatter_tensors(weights, own))
        averages = scatter_tensors(checkpoint.tensors("ema"), self.ema.state_dict())
        self.ema.load_state_dict(averages, step=saved["ema_step"])
        moments, parameters = checkpoint.tensors("optimizer"), dict(self.network.named_parameters())
        # A slot is called `parameter.slot`, and is cut like its parameter.
        like = {key: parameters[name] for key in moments if (name := key.rpartition(".")[0]) in parameters}
        restore_moments(self.optimizer, self.network, scatter_tensors(moments, like))
        self.spikes.load_state_dict(saved["spikes"])
        if self.scaler is not None and saved["scaler"] is not None:
            self.scaler.load_state_dict(saved["scaler"])
        if self.clip is not None and "clip" in saved:
            self.clip.load_state_dict(saved["clip"])
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


def check_kinds(checkpoint: Checkpoint, saved: Mapping[str, Any]) -> None:
    """Raise where a checkpoint says something else than `as_json` does, for instance because it was written by hand."""
    kinds: dict[str, Any] = {**dict.fromkeys(COUNTS, int), "loss_sum": int | float, "ema_step": int, "spikes": dict}
    kinds |= {"metrics_size": int, "scaler": dict | None, "monitor": dict | None}
    for key, kind in kinds.items():
        if not isinstance(saved.get(key), kind) or isinstance(saved.get(key), bool):
            raise checkpoint.damaged(f"its state has {saved.get(key)!r} as {key}")


def build_optimizer(network: nn.Module, config: OptimConfig, device: torch.device) -> Optimizer:
    fused = device.type in FUSED
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=fused,
        foreach=None if fused else True,
    )


def build_clip(config: OptimConfig, parameters: Sequence[nn.Parameter]) -> AdaptiveClip | None:
    return None if config.adaptive_clip is None else AdaptiveClip(config.adaptive_clip, parameters)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of one of so many steps, counted from 0: a linear warm-up that reaches the full rate, then the schedule.

    >>> config = OptimConfig(lr=1.0, warmup_steps=4)
    >>> [learning_rate(config, step, 8) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    >>> config = OptimConfig(lr=1.0, warmup_steps=2, schedule="linear")
    >>> [learning_rate(config, step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps or config.schedule == "constant":
        return config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))
    left = (steps - step) / (steps - config.warmup_steps)
    return config.lr * (left if config.schedule == "linear" else math.sin(0.5 * math.pi * left) ** 2)


def moments_of(optimizer: Optimizer, network: nn.Module) -> dict[str, Tensor]:
    """What the optimiser keeps for each parameter, as `parameter.slot`; its settings are the recipe's."""
    order = parameter_names(optimizer, network)
    slots = optimizer.state_dict()["state"].items()
    return {f"{order[index]}.{slot}": value for index, kept in slots for slot, value in kept.items()}


def restore_moments(optimizer: Optimizer, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load what `moments_of` gave, matched by name, in each parameter's memory layout."""
    own, order = optimizer.state_dict(), parameter_names(optimizer, network)
    slots: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, slot = key.rpartition(".")
        slots.setdefault(name, {})[slot] = value
    if slots and slots.keys() != set(order):
        strange = sorted(slots.keys() ^ set(order))
        raise ValueError(
            f"the saved optimiser state is of {len(slots)} parameters and this optimiser has {len(order)}: "
            f"{', '.join(strange[:3])} is only in one of them. Resume with the model of the run that was saved."
        )
    own["state"] = {index: slots[name] for index, name in enumerate(order) if slots}
    optimizer.load_state_dict(own)
    for parameter, kept in optimizer.state.items():
        for slot, value in kept.items():
            # Files hold plain row order; a channels-last weight whose averages are not would leave the fast path.
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                kept[slot] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def parameter_names(optimizer: Optimizer, network: nn.Module) -> list[str]:
    """The names of an optimiser's parameters in its own order."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
