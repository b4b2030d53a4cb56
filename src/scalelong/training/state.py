"""Everything that a run's next step depends on, to a checkpoint and back to the bit; the optimiser and its rate.

Batches, times, noise and the learning rate are functions of the step, so they need no state of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config.sections import OptimConfig
from ..guard.belt import SeatBelt
from ..guard.losses import Spike, SpikeDetector
from ..runs.checkpoint import Checkpoint
from ..runs.run_dir import RunError
from ..utils.runtime import first_names, is_averaged, local, tensors_of
from .clip import AdaptiveClip
from .parallel import gather_tensors, scatter_tensors

Model = TypeVar("Model", bound=nn.Module)

FORMAT = 2
"""Of what a checkpoint says besides its tensors."""

COUNTS = ("step", "batch_offset", "skipped", "loss_sum", "loss_count", "evaluated")


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
    belt: SeatBelt | None = None
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    step: int = 0
    """Steps done."""
    batch_offset: int = 0
    """Batches left out by rollbacks: step k takes batch k + batch_offset."""
    skipped: int = 0
    """Non-finite steps in a row up to now."""
    loss_sum: float = 0.0
    """Losses since the last logged step, and how many they are."""
    loss_count: int = 0
    evaluated: int = 0
    """The last step whose samples were evaluated."""

    @property
    def factor(self) -> float:
        """By what the seat belt multiplies the learning rate."""
        return 1.0 if self.belt is None else self.belt.factor

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
        """What a checkpoint holds, whole; shards are gathered by all processes, and those that `keep` get it.

        After a regular checkpoint the belt has no snapshot of another step; others are saved beside.
        """
        if self.belt is None or all(snapshot.step == self.step for snapshot in self.belt.ring):
            return self._groups(keep)
        subject, now = self.belt.subject, self.belt.subject.take(self.step)
        groups = self._groups(keep, copy=True)
        for snapshot in self.belt.ring:
            subject.put_back(snapshot)
            groups |= self._groups(keep, f"belt{snapshot.step}-", copy=True)
        subject.put_back(now)
        return groups

    def _groups(self, keep: bool, prefix: str = "", *, copy: bool = False) -> dict[str, dict[str, Tensor]]:
        parts = {"model": self.network.state_dict(), "ema": self.ema.state_dict()}
        parts["optimizer"] = moments_of(self.optimizer, self.network)
        whole = {prefix + group: gather_tensors(tensors, keep) for group, tensors in parts.items()}
        return deepcopy(whole) if copy else whole

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint says besides its tensors."""
        others = [
            {"ema_step": one["ema"]["step"], "scaler": one.get("scaler"), "clip": [*one["also"], None][0]}
            for one in ([] if self.belt is None else [snapshot.others for snapshot in self.belt.ring])
        ]
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in COUNTS},
            "ema_step": self.ema.step,
            "spikes": self.spikes.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            **({} if self.clip is None else {"clip": self.clip.state_dict()}),
            **({} if self.belt is None else {"belt": self.belt.facts(), "snapshots": others}),
        }

    def load(self, checkpoint: Checkpoint, *, same_run: bool = True) -> dict[str, Any]:
        """Continue as if the run had never stopped; returns all that the checkpoint says. A branch has a new belt."""
        saved = checkpoint.state()
        if saved.get("format") != FORMAT:
            raise RunError(f"{checkpoint.path} was written by another version of scalelong: train anew with this one")
        check_kinds(checkpoint, saved)
        if self.belt is not None and same_run and saved.get("belt") is not None:
            self.belt.load_facts(saved["belt"])
            for kept, others in zip(saved["belt"]["ring"], saved["snapshots"], strict=True):
                prefix = f"belt{kept['step']}-" if f"belt{kept['step']}-model" in checkpoint.groups else ""
                self._load_training(checkpoint, others, prefix)
                self.belt.ring.append(replace(self.belt.subject.take(kept["step"]), **kept))
        self._load_training(checkpoint, saved)
        for name in COUNTS:
            setattr(self, name, saved[name])
        self.spikes.load_state_dict(saved["spikes"])
        return saved

    def _load_training(self, checkpoint: Checkpoint, saved: Mapping[str, Any], prefix: str = "") -> None:
        """Weights, EMA, optimiser, scaler and clipping of a checkpoint, or of a snapshot in it."""
        weights, own = checkpoint.tensors(f"{prefix}model"), self.network.state_dict()
        refuse_other_network(checkpoint.path, weights, own)
        self.network.load_state_dict(scatter_tensors(weights, own))
        averages = scatter_tensors(checkpoint.tensors(f"{prefix}ema"), self.ema.state_dict())
        self.ema.load_state_dict(averages, step=saved["ema_step"])
        moments, parameters = checkpoint.tensors(f"{prefix}optimizer"), dict(self.network.named_parameters())
        # A slot is called `parameter.slot`, and is cut like its parameter.
        like = {key: parameters[name] for key in moments if (name := key.rpartition(".")[0]) in parameters}
        restore_moments(self.optimizer, self.network, scatter_tensors(moments, like))
        if self.scaler is not None and saved["scaler"] is not None:
            self.scaler.load_state_dict(saved["scaler"])
        if self.clip is not None and saved.get("clip"):
            self.clip.load_state_dict(saved["clip"])

    def go_back(self, step: int) -> None:
        """Count from an earlier step, whose weights are there again, with batches that come after those seen.

        The same batches are not tried again: they might do the same again.
        """
        self.batch_offset += self.step - step
        self.step, self.skipped, self.evaluated = step, 0, min(self.evaluated, step)
        self.loss_sum, self.loss_count = 0.0, 0


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


class EMA:
    """A shadow of a model's parameters, s ← s + (1 − d)·(p − s), in float32 or better; buffers are copied.

    With `warmup` the decay of update n = 0, 1, … is d = min(decay, (1 + n)/(10 + n)). Names are those of the model's
    state_dict, so tied weights and scaled skips are included. Make it once the model is whole and on its device; of
    sharded parameters (FSDP) it keeps the shards.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> ema = EMA(model, decay=0.5, warmup=False)
    >>> before = model.weight.item()
    >>> _ = model.weight.data.add_(1.0)
    >>> ema.update(model)
    >>> round(ema.state_dict()["weight"].item() - before, 6)
    0.5
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, *, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1, got {decay}")
        self.decay = decay
        self.warmup = warmup
        self.step = 0
        self._swapped = False
        sources = tensors_of(model)
        self._expected = set(sources)
        self._first_name = first_names(model)
        kept = {name: sources[name] for name in dict.fromkeys(self._first_name.values())}
        self._averages = {name: wide_copy(tensor) for name, tensor in kept.items() if is_averaged(tensor)}
        self._copies = {name: tensor.detach().clone() for name, tensor in kept.items() if name not in self._averages}

    def decay_now(self) -> float:
        """The decay of the next update."""
        return min(self.decay, (1 + self.step) / (10 + self.step)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the shadow towards the model's parameters, and copy its buffers."""
        sources = self._sources(model)
        weight = 1 - self.decay_now()
        alike = [name for name, shadow in self._averages.items() if sources[name].dtype == shadow.dtype]
        if alike:
            # Shards are averaged each for itself: the whole would take the same numbers through Python's slow dispatch.
            shadows, parameters = ([local(tensors[name]) for name in alike] for tensors in (self._averages, sources))
            torch._foreach_lerp_(shadows, parameters, weight)  # pyright: ignore[reportPrivateImportUsage]
        for name in self._averages.keys() - set(alike):
            # lerp does not mix precisions; one at a time, so that only one parameter is ever copied.
            shadow = self._averages[name]
            shadow.lerp_(sources[name].to(shadow.dtype), weight)
        if self._copies:
            copies, buffers = list(self._copies.values()), [sources[name] for name in self._copies]
            torch._foreach_copy_(copies, buffers)  # pyright: ignore[reportPrivateImportUsage]
        self.step += 1

    @contextmanager
    def swap(self, model: Model) -> Iterator[Model]:
        """The model with EMA weights inside a `with`; its own come back afterwards, to the bit.

        Values are exchanged in place, so that optimisers and compiled code keep their tensors and no second copy of the
        weights is made, except of those in half precision.
        """
        own = self._exchange(model, {})
        self._swapped = True
        try:
            yield model
        finally:
            self._swapped = False
            self._exchange(model, own)

    def state_dict(self) -> dict[str, Tensor]:
        """The shadow itself, not a copy, under the names of the model's state_dict."""
        self._refuse_while_swapped()
        shadow = {**self._averages, **self._copies}
        return {name: shadow[first] for name, first in self._first_name.items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """Take over a saved shadow; `step` is the number of updates it had seen, which the warm-up needs."""
        own = self.state_dict()
        refuse_other_names(own, tensors, "the saved average")
        for name, shadow in own.items():
            shadow.copy_(tensors[name])
        self.step = step

    @torch.no_grad()
    def _exchange(self, model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Swap values with the model; weights that would not fit back into the shadow are returned, or taken, apart."""
        sources = self._sources(model)
        apart = {}
        for name, shadow in self._averages.items():
            parameter, before = sources[name], sources[name].clone()
            parameter.copy_(own.get(name, shadow))
            if parameter.dtype == shadow.dtype:
                shadow.copy_(before)
            else:
                apart[name] = before
        return apart

    def _sources(self, model: nn.Module) -> dict[str, Tensor]:
        self._refuse_while_swapped()
        sources = tensors_of(model)
        if sources.keys() != self._expected:
            refuse_other_names(self._first_name, model.state_dict(), f"this {type(model).__name__}")
        return sources

    def _refuse_while_swapped(self) -> None:
        if self._swapped:
            raise RuntimeError("the EMA weights are swapped into the model; leave the `with ema.swap(…)` first")


def wide_copy(parameter: Tensor) -> Tensor:
    """A copy in float32 or better: a step of 1e-4 of the distance is lost in the 8 bits of a bfloat16."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)


def refuse_other_names(expected: Mapping[str, object], found: Mapping[str, object], where: str) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise ValueError(
            f"{where} does not fit the average: missing {missing[:3] or 'nothing'}, extra {extra[:3] or 'nothing'}. "
            "Make the EMA after the model has all its parameters, scaled skips included."
        )
