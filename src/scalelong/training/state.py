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

from ..config.schema import OptimConfig
from ..guard.nonfinite import Spike, SpikeDetector
from ..runs.checkpoint import Checkpoint
from ..runs.run_dir import RunError
from .ema import EMA
from .parallel import gather_tensors, scatter_tensors

# The devices whose AdamW is one kernel in every supported version of torch.
FUSED = {"cuda", "cpu", "xpu"}

Flat = tuple[dict[str, Tensor], dict[str, Any]]
Names = Sequence[Sequence[str]]

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


def learning_rate(config: OptimConfig, step: int) -> float:
    """The rate of a step, counted from 0: a linear warm-up that reaches the full rate, then constant.

    >>> config = OptimConfig(lr=1.0, warmup_steps=4)
    >>> [learning_rate(config, step) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of an optimiser's parameters, group by group, in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    foreign = sum(id(parameter) not in names for group in groups for parameter in group)
    if foreign:
        raise ValueError(
            f"{foreign} parameters of the optimiser are not those of this {type(model).__name__}. "
            "Pass the model that the optimiser was made for, after anything that replaces its parameters."
        )
    return [[names[id(parameter)] for parameter in group] for group in groups]


def flatten_optimizer(state_dict: Mapping[str, Any], names: Names) -> Flat:
    """An optimiser's state_dict as tensors `parameter.slot`, and JSON; `names` are those of `parameter_names`."""
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    name_of = dict(zip(keys, [name for group in names for name in group], strict=True))
    tensors: dict[str, Tensor] = {}
    slots = {
        name_of[key]: {slot: encode(value, f"{name_of[key]}.{slot}", tensors) for slot, value in values.items()}
        for key, values in state_dict["state"].items()
    }
    settings = [
        {key: encode(value, f"param_groups.{index}.{key}", tensors) for key, value in group.items()}
        | {"params": [name_of[key] for key in group["params"]]}
        for index, group in enumerate(groups)
    ]
    return tensors, {"param_groups": settings, "state": slots}


def unflatten_optimizer(tensors: Mapping[str, Tensor], state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """The state_dict that `flatten_optimizer` took apart, numbered in the order of `names`."""
    groups = regroup(state["param_groups"], names)
    key_of = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {
            key_of[name]: {slot: decode(value, tensors) for slot, value in slots.items()}
            for name, slots in state["state"].items()
        },
        "param_groups": [
            {key: decode(value, tensors) for key, value in group.items()}
            | {"params": [key_of[name] for name in group["params"]]}
            for group in groups
        ],
    }


def restore_optimizer(
    optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Load a flattened state into an optimiser, matching parameters by name and taking over their memory layout."""
    optimizer.load_state_dict(unflatten_optimizer(tensors, state, parameter_names(model, optimizer)))
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            # Files hold plain row order; a channels-last weight whose averages are not would leave the fast path.
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                slots[slot] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def regroup(groups: Sequence[Mapping[str, Any]], names: Names) -> list[dict[str, Any]]:
    """The groups of a flattened state with their parameters in another order; raises unless they are the same."""
    saved, wanted = [set(group["params"]) for group in groups], [set(group) for group in names]
    if saved != wanted:
        missing, extra = set().union(*wanted) - set().union(*saved), set().union(*saved) - set().union(*wanted)
        raise ValueError(
            f"the saved optimiser state has {len(saved)} groups and this optimiser {len(wanted)}; "
            f"without a saved state: {some(missing)}; saved but not here: {some(extra)}. "
            "Resume with the model and optimiser settings of the run that was saved."
        )
    return [reorder(group, order) for group, order in zip(groups, names, strict=True)]


def reorder(group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    moved = {"params": list(names)}
    if "param_names" in group:  # The optimiser's own list runs parallel to its parameters.
        own = dict(zip(group["params"], group["param_names"], strict=True))
        moved["param_names"] = [own[name] for name in names]
    return {**group, **moved}


def some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return (", ".join(shown) + (", …" if len(names) > len(shown) else "")) or "none"


def encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON that keeps tuples apart from lists; a tensor goes to `tensors` under `key`."""
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, tuple | list):
        items = [encode(item, f"{key}.{index}", tensors) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, str | int | float | None):
        return value
    raise ValueError(f"{key} of the optimiser is a {type(value).__name__}; only numbers, text and tensors can be kept")


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": key}:
            return tensors[key]
        case {"tuple": items}:
            return tuple(decode(item, tensors) for item in items)
        case list():
            return [decode(item, tensors) for item in value]
    return value
