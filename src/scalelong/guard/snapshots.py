"""Copies of a training state in memory, taken and put back in place: weights, optimiser, EMA, scaler, random states."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..utils.atomic import human_size
from ..utils.runtime import local, tensors_in

KEEP = 4
"""Snapshots that a belt keeps."""

# Of an optimiser's settings these are not put back: the rate belongs to the loop's scheduler.
OF_SCHEDULER = ("params", "lr", "initial_lr")

MEMORY = Path("/proc/meminfo")


@dataclass
class Snapshot:
    """The state after a step; `uses` counts how often a run went back to it."""

    step: int
    uses: int = 0
    sizes: dict[str, float] = field(default_factory=dict)
    """What the outputs of the network's blocks measured, by name."""
    watch: dict[str, Any] = field(default_factory=dict)
    """What was known of the losses: those that a run comes back to are not a collapse."""
    tensors: dict[Hashable, Tensor] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


class Subject:
    """What is copied: a model, its optimiser and what belongs to them. Of shards (FSDP) each process has its own."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, ema: Any = None, scaler: Any = None, also: Sequence[Any] = ()
    ) -> None:
        self.model, self.optimizer, self.ema, self.scaler, self.also = model, optimizer, ema, scaler, also
        self.parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.device = next(model.parameters()).device
        self.emptied: dict[int, Any] = {}
        """What the optimiser kept for a weight before it went back to its first step, in case it comes again."""

    def bytes(self) -> int:
        """How much a snapshot takes, if the optimiser keeps two numbers for a weight as Adam does."""
        kept = sum(tensor.nbytes for tensor in self._tensors().values())
        begun = any(self.optimizer.state.values())
        return kept if begun else kept + 2 * sum(local(weight).nbytes for weight in self.parameters)

    @torch.no_grad()
    def take(self, step: int, into: Snapshot | None = None) -> Snapshot:
        """Copy the state, into the memory of a snapshot that is not needed any more; nothing waits for a GPU."""
        old = {} if into is None else into.tensors
        taken = Snapshot(step)
        self.emptied.clear()
        for key, tensor in self._tensors().items():
            kept = old.get(key)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            taken.tensors[key] = kept.copy_(tensor, non_blocking=True)
        taken.others = self._others()
        return taken

    @torch.no_grad()
    def put_back(self, snapshot: Snapshot) -> None:
        """Make the state what it was, in place: compiled code and the optimiser keep their tensors."""
        state, slots = self.optimizer.state, snapshot.others["slots"]
        for number, weight in enumerate(self.parameters):
            if number not in slots and state.get(weight):
                self.emptied[number] = state.pop(weight)
            elif number in slots and not state.get(weight):
                state[weight] = self.emptied.pop(number)
        for key, tensor in self._tensors().items():
            if key in snapshot.tensors:
                tensor.copy_(snapshot.tensors[key], non_blocking=True)
        others = deepcopy(snapshot.others)
        for number, values in others["slots"].items():
            self.optimizer.state[self.parameters[number]].update(values)
        for group, settings in zip(self.optimizer.param_groups, others["groups"], strict=True):
            group.update(settings)
        if self.ema is not None:
            vars(self.ema).update(others["ema"])
        if self.scaler is not None:
            self.scaler.load_state_dict(others["scaler"])
        for part, state in zip(self.also, others["also"], strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(others["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(others["random_cuda"], self.device)

    def _tensors(self) -> dict[Hashable, Tensor]:
        """Every tensor that training changes, as it is in this process."""
        found: dict[Hashable, Tensor] = {}
        for where, holder in (("model", self.model), ("ema", self.ema)):
            found |= {(where, number): local(tensor).detach() for number, tensor in enumerate(tensors_of(holder))}
        for number, weight in enumerate(self.parameters):
            for slot, value in self.optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor):
                    found["optimizer", number, slot] = local(value)
        return found

    def _others(self) -> dict[str, Any]:
        """What is no tensor of a fixed size, copied."""
        state = {number: self.optimizer.state.get(weight) for number, weight in enumerate(self.parameters)}
        slots = {
            number: {slot: value for slot, value in values.items() if not isinstance(value, Tensor)}
            for number, values in state.items()
            if values
        }
        groups = [
            {name: value for name, value in group.items() if name not in OF_SCHEDULER}
            for group in self.optimizer.param_groups
        ]
        of_ema = {} if self.ema is None or isinstance(self.ema, nn.Module) else vars(self.ema)
        counts = {name: value for name, value in of_ema.items() if isinstance(value, bool | int | float)}
        found: dict[str, Any] = {"slots": slots, "groups": groups, "ema": counts, "random": torch.get_rng_state()}
        found["also"] = [part.state_dict() for part in self.also]
        if self.scaler is not None:
            found["scaler"] = self.scaler.state_dict()
        if self.device.type == "cuda":
            found["random_cuda"] = torch.cuda.get_rng_state(self.device)
        return deepcopy(found)


def tensors_of(holder: Any) -> Iterable[Tensor]:
    """Those of a module, each once, or of any other object that averages weights."""
    if isinstance(holder, nn.Module):
        return [*holder.parameters(), *holder.buffers()]
    return [] if holder is None else list(tensors_in(vars(holder)))


def free_memory() -> float:
    """Bytes that this process may take of the machine's memory; infinite where the system does not say."""
    lines = MEMORY.read_text().splitlines() if MEMORY.is_file() else []
    free = next((line for line in lines if line.startswith("MemAvailable")), None)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return float("inf") if free is None else int(free.split()[1]) * 1024 / processes


def check_memory(name: str, size: int) -> None:
    """Raise where there is no room for all snapshots of a model."""
    needed, free = KEEP * size, free_memory()
    if needed > free:
        raise MemoryError(
            f"no memory for a seat belt: {KEEP} snapshots of {name} with optimiser and EMA take {human_size(needed)}, "
            f"{human_size(free)} are free: train without one (training.seat_belt=false), or free some"
        )
