"""The seat belt: a run that collapses is put back to where it was healthy, and goes on at a lower rate.

belt = SeatBelt(model, optimizer, ema)
for batch in batches:
    ...  # forward, backward, optimizer.step(), ema.update()
    event = belt.step(loss)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from ..utils.runtime import Hook, blocks_of, tensors_in
from .losses import WINDOW, LossWatch, Restoration, TrainingDiverged
from .snapshots import KEEP, Snapshot, Subject, check_memory

LOWER = 0.7
"""Rates are multiplied by it, once more for each time that the same snapshot was gone back to before."""
REPEATS = 3
"""How often a run may go back to the same snapshot."""
GROWN = 2.0
"""A block has grown if its output measures so many times as much as in the snapshot."""
LONGEST = 8 * WINDOW
"""Steps between two snapshots at most."""


class SeatBelt:
    """Watches the loss of any training loop, keeps four snapshots in memory, and on a collapse goes back to the oldest.

    Call `step(loss)` once after each step of the optimiser. `nothing` is the loss of predicting nothing: 1 for
    predicted noise, `DiffusionProcess.loss_of_nothing` in general; unless it is given, the first losses stand for it.
    `ema` is a module, or any object that holds averages of the weights; `scaler` is the gradient scaler of fp16, and
    `also` what else is to go back, anything with `state_dict` and `load_state_dict`. A collapse multiplies all later
    rates by 0.7, only while the optimiser steps, so that no scheduler sees it. With several processes (DDP, FSDP) each
    has a belt, and all do the same.

    >>> model = nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> belt = SeatBelt(model, optimizer, nothing=1.0)
    >>> for loss in 20 * [0.2] + 20 * [0.9]:
    ...     optimizer.step()
    ...     event = belt.step(loss)
    >>> event.back_to, event.factor
    (0, 0.7)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        ema: Any = None,
        *,
        nothing: float | None = None,
        scaler: Any = None,
        also: Sequence[Any] = (),
    ) -> None:
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner  # As Accelerate and Lightning wrap it.
        check_parts(model, optimizer, nothing)
        self.subject = Subject(model, optimizer, ema, scaler, also)
        check_memory(type(model).__name__, self.subject.bytes())
        self.watch = LossWatch(nothing)
        self.ring: list[Snapshot] = []
        """Oldest first."""
        self.factor = 1.0
        """By what the rates are multiplied."""
        self.count = 0
        """The last step of the loop, from 1."""
        self.losses: list[float | Tensor] = []
        """Of the window that is not full yet; on a GPU they stay there until it is."""
        self.sizes: list[dict[str, float]] = []
        """What each block's output measured in the last step of every window since the oldest snapshot."""
        self._latest: dict[str, Tensor | float] = {}
        self._updated = False
        self._rates: list[Any] = []
        self._attach()
        self._measure()

    def step(self, loss: Tensor | float, *, number: int | None = None, updated: bool = True) -> Restoration | None:
        """Note the loss of a step; says what was done if the run had collapsed, else None.

        The step's `number` counts from 1 unless given: a loop that goes back together with its belt gives it.
        `updated=False` says that the loop itself left the optimiser's step out. Raises TrainingDiverged where going
        back has not helped.
        """
        if not self.attached:
            raise RuntimeError(
                "this SeatBelt was removed, or its optimiser was given another one: call that one's step"
            )
        # A scaler leaves steps out by itself.
        if updated and not self._updated and self.subject.scaler is None:
            raise RuntimeError(
                "SeatBelt.step was called twice for one step of its optimiser: call it once after optimizer.step(), "
                "and as step(loss, updated=False) where your loop leaves that out"
            )
        self.losses.append(as_loss(loss))
        self.count, self._updated = self.count + 1 if number is None else number, False
        self._reading.close()
        if len(self.losses) == WINDOW - 1:
            self._measure()
        return self._end_window() if len(self.losses) == WINDOW else None

    def restore(self, why: str = "", *, step: int | None = None) -> Restoration:
        """Go back to the oldest snapshot and lower the rate, as after a collapse; `why` is said instead of the loss."""
        if not self.ring:
            raise RuntimeError("this SeatBelt has no snapshot yet: it takes the first when its optimiser steps")
        back, (block, growth), watch = self.ring[0], self._first_grown(), self.watch
        back.uses += 1
        factor = self.factor * LOWER**back.uses
        found = (watch.mean, watch.best, watch.nothing, factor, block, growth, why)
        event = Restoration(self.count if step is None else step, back.step, *found)
        if back.uses > REPEATS:
            raise TrainingDiverged(event.diagnosis(REPEATS))
        self.subject.put_back(back)
        self.factor, self.ring, self.losses, self.sizes = factor, [back], [], []
        watch.load_state_dict({**back.watch, "nothing": watch.nothing})
        return event

    def rebase(self) -> None:
        """Take a snapshot now and, if the run is healthy, forget the others: a loop that writes a checkpoint may."""
        if self.watch.is_calm(over_processes(fetch(self.losses), self.subject.device)):
            self.ring, self.sizes = [self._take()], []

    def remove(self) -> None:
        """Leave model and optimiser alone, and free the snapshots."""
        self._reading.close()
        self._hooks.close()
        self.attached = False
        self.ring.clear()

    # To a checkpoint and back

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed loop needs to go on as if it had never stopped, snapshots included, for torch.save."""
        return {**self.facts(), "ring": [vars(snapshot) for snapshot in self.ring]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load_facts(state)
        self.ring = [Snapshot(**deepcopy(dict(snapshot))) for snapshot in state["ring"]]

    def facts(self) -> dict[str, Any]:
        """The state without the snapshots, as JSON."""
        latest = {name: float(size) for name, size in self._latest.items()}
        ring = [{name: getattr(one, name) for name in ("step", "uses", "sizes", "watch")} for one in self.ring]
        numbers = {"count": self.count, "factor": self.factor, "losses": fetch(self.losses)}
        return {**numbers, "watch": self.watch.state_dict(), "sizes": self.sizes, "latest": latest, "ring": ring}

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        self.count, self.factor, self.losses = facts["count"], facts["factor"], list(facts["losses"])
        self.sizes, self._latest = [dict(row) for row in facts["sizes"]], dict(facts["latest"])
        self.watch.load_state_dict(facts["watch"])
        self._reading.close()
        # A loop that has not begun measures its first step, for the first snapshot.
        if not facts["ring"] or len(self.losses) == WINDOW - 1:
            self._measure()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_hooks", "_reading")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reading = ExitStack()
        if self.attached:
            self._attach()
            if len(self.losses) in (0, WINDOW - 1):
                self._measure()

    # At the end of a window

    def _end_window(self) -> Restoration | None:
        """The only place where a belt waits for the device, or talks to other processes."""
        losses, self.losses = over_processes(fetch(self.losses), self.subject.device), []
        sizes = dict(zip(self._latest, fetch(list(self._latest.values())), strict=True))
        self._latest = {**sizes}
        self.sizes.append(sizes)
        state = self.watch.look(losses)
        if state == "collapsed":
            return self.restore()
        if state == "healthy" and self.count - self.ring[-1].step >= spacing(self.count):
            self.ring.append(self._take(self.ring.pop(0) if len(self.ring) == KEEP else None))
        return None

    def _take(self, into: Snapshot | None = None) -> Snapshot:
        taken = self.subject.take(self.count, into)
        taken.sizes = {name: float(size) for name, size in self._latest.items()}
        taken.watch = self.watch.state_dict()
        return taken

    def _first_grown(self) -> tuple[str, float]:
        """The first block that had grown since the oldest snapshot, in time and then in the network, and how often."""
        before = self.ring[0].sizes
        growths = [
            {name: row[name] / size for name, size in before.items() if size and name in row} for row in self.sizes
        ]
        for row in growths:
            grown = [name for name in row if not row[name] <= GROWN]
            if grown:
                return grown[0], row[grown[0]]
        most = max(growths[-1], key=growths[-1].__getitem__) if growths and growths[-1] else ""
        return most, growths[-1][most] if most else 1.0

    # Hooks: around the optimiser's step, and on the blocks during the steps in which they are measured

    def _attach(self) -> None:
        optimizer = self.subject.optimizer
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, SeatBelt):
                owner.remove()
        self._hooks, self._reading, self.attached = ExitStack(), ExitStack(), True
        self._hooks.callback(optimizer.register_step_pre_hook(self._before_update).remove)
        self._hooks.callback(optimizer.register_step_post_hook(self._after_update).remove)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.ring:
            self.ring.append(self._take())
        self._give_rates_back(optimizer)  # Those of a step that failed.
        if self.factor != 1.0:
            self._rates = [deepcopy(group["lr"]) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= self.factor  # In place where the rate is a tensor.

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._give_rates_back(optimizer)
        self._updated = True

    def _give_rates_back(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = group["lr"].copy_(rate) if isinstance(rate, Tensor) else rate
        self._rates = []

    def _measure(self) -> None:
        self._latest = {}
        for name, block in parts_of(self.subject.model).items():
            self._reading.enter_context(block.register_forward_hook(Hook(partial(self._read, name))))

    def _read(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return  # Compiled code would carry the reading in every step.
        features = next(tensors_in(output if isinstance(output, Mapping) else getattr(output, "sample", output)), None)
        if features is not None:
            self._latest[name] = features.detach().float().square().mean().sqrt()


def check_parts(model: nn.Module, optimizer: Any, nothing: float | None) -> None:
    """Raise, in one line, if the arguments do not fit each other."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"SeatBelt needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    own = {id(weight) for weight in model.parameters()}
    strange = sum(id(weight) not in own for group in optimizer.param_groups for weight in group["params"])
    if strange:
        raise ValueError(
            f"this optimiser is of another model: {strange} of its weights are not in {type(model).__name__}. Pass the "
            "model that it was made for, as it is now; several models as nn.ModuleList([...])"
        )
    if nothing is not None and not (math.isfinite(nothing) and nothing > 0):
        raise ValueError(f"nothing is the loss of predicting nothing, a number above 0, got {nothing}")


def as_loss(loss: Any) -> float | Tensor:
    """The loss as a number, or on its device as a tensor of one, so that nothing waits. Shape: () or (1,) → ()."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        found = loss.detach().reshape(())
        return found.item() if found.device.type == "cpu" else found.float().clone()
    if isinstance(loss, Real):
        return float(loss)
    seen = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else repr(loss)
    raise TypeError(f"SeatBelt.step needs the loss of the step, a number or a tensor of one, got {seen}")


def fetch(values: Sequence[float | Tensor]) -> list[float]:
    """All as numbers; those on a device come together."""
    waiting = [value for value in values if isinstance(value, Tensor)]
    found = iter(torch.stack([value.to(waiting[0].device) for value in waiting]).tolist() if waiting else ())
    return [next(found) if isinstance(value, Tensor) else value for value in values]


def over_processes(losses: list[float], device: torch.device) -> list[float]:
    """The means over all processes, in each of them."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return losses
    total = torch.tensor(losses, device=device)
    distributed.all_reduce(total)
    return (total / distributed.get_world_size()).tolist()


def spacing(step: int) -> int:
    """Steps between snapshots: short while a run is short, so that four span 80 steps at first, and 640 in the end.

    >>> spacing(500), spacing(2_500), spacing(100_000)
    (20, 40, 160)
    """
    return min(LONGEST, max(WINDOW, step // 1000 * WINDOW))


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The network's blocks by path, also within DDP, a compiled module or another wrapper."""
    blocks = blocks_of(model)
    while len(blocks) == 1:
        name, block = next(iter(blocks.items()))
        if not (inner := blocks_of(block, f"{name}.")):
            break
        blocks = inner
    return blocks
