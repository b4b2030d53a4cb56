"""See the oscillation of the long skips while a model trains, in anyone's loop.

with SkipMonitor(model) as monitor:
    for batch in batches:
        ...  # forward, backward, optimizer.step()
        monitor.step()
"""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..guard.belt import as_loss, fetch
from ..skips import SkipSite
from ..skips.apply import choose_sites, compiled_elsewhere, scaled_networks
from ..skips.find import refuse_other_objects
from ..skips.hooks import attached_hooks
from ..skips.trace import ExampleInputs
from .hooks import SkipHooks, output_change
from .readings import Processes, Table, named, unwrapped, with_nulls
from .states import StateWatch, Status

KEEP = 1000
"""Readings that are kept; the older ones can only be had by writing them in time."""

UNSEEN = (
    "SkipMonitor saw no training pass through {name}: it was compiled after the monitor was made, or another copy of "
    "it is trained. Monitor the model that is trained, uncompiled."
)


class SkipMonitor:
    """Reads every `every` steps what the long skips and the blocks of a model do, and every `probe_every` steps how
    robust its output is; `window` readings make an oscillation index.

    A monitored run is the same to the bit as one without. `sites` and `example_inputs` are those of `scale_skips`, for
    models that no family knows; `scaler` is the gradient scaler of fp16, if there is one; `nothing` is the loss of
    predicting nothing (1 for predicted noise; unless it is given the first losses stand for it). What is read stays on
    the device until `readings()`, `latest`, `status` or `write()` asks for it. A model wrapped by DDP or FSDP is read
    over all its processes, each of which must call `step` then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 10,
        probe_every: int | None = 100,
        window: int = 20,
        sites: Iterable[SkipSite | int] | None = None,
        example_inputs: ExampleInputs | None = None,
        scaler: Any = None,
        nothing: float | None = None,
    ) -> None:
        if every < 1 or window < 2:
            raise ValueError(f"every must be at least 1 and window at least 2, got {every=}, {window=}")
        if probe_every is not None and (probe_every < 1 or probe_every % every):
            wanted = f"a multiple of every={every}, or None to never probe"
            raise ValueError(f"probe_every must be {wanted}, got {probe_every}")
        self.every, self.probe_every = every, probe_every
        self.model, self.processes = unwrapped(model), Processes.of(model)
        refuse_compiled(self.model)
        self.network, self.sites = choose(self.model, sites, example_inputs)
        self.hooks = SkipHooks(self.network, self.sites, self.processes, scaler)
        self.table = Table((site.index for site in self.sites), self.hooks.blocks, window)
        self.columns = [*self.table.names, *(f"{name}_oscillation" for name in self.table.series)]
        self.states = StateWatch(nothing)
        self.count = 0
        """The last step of the optimiser, from 1."""
        self.running = self.attached = self.warned = False
        self.pending: list[tuple[int, Tensor]] = []
        """Steps that were read, with their numbers on the device."""
        self.losses: list[tuple[int, Tensor | float]] = []
        """Of the steps since then, on the device too."""
        self.records: deque[tuple[int, Tensor]] = deque(maxlen=KEEP)
        """Steps with all columns, on the CPU."""
        self.unwritten = 0

    def __enter__(self) -> SkipMonitor:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> SkipMonitor:
        """Read from the next step on, as on entering the context."""
        self.running = True
        self.seek(self.count)
        return self

    def stop(self) -> None:
        """Leave the model alone; what was read stays at hand."""
        self.running = False
        self.seek(self.count)

    def step(self, number: int | None = None, loss: Tensor | float | None = None) -> bool:
        """Call it after the optimiser's step, whose `number` counts from 1 unless given; whether the step was read.

        With the `loss` of every step, of the whole batch, the state also says when it is on its way to that of
        predicting nothing.
        """
        if not self.running:
            raise RuntimeError("this SkipMonitor is not watching: use `with SkipMonitor(model) as monitor:`")
        number = self.count + 1 if number is None else number
        if loss is not None:
            self.losses.append((number, as_loss(loss)))
        read = self.attached and self._read(number)
        if len(self.losses) >= KEEP:
            self._fetch()
        self.seek(number)
        return read

    def seek(self, number: int) -> None:
        """Resume after step `number`, after a rollback for instance."""
        self.count = number
        self.hooks.detach()
        self.attached = self.running and (number + 1) % self.every == 0
        if self.attached:
            refuse_compiled(self.model, thorough=False)
            self.hooks.attach()

    def readings(self) -> list[dict[str, float]]:
        """The last readings, up to a thousand, oldest first: `step` and the numbers of `latest`."""
        self._fetch()
        return [self._reading(*record) for record in self.records]

    @property
    def latest(self) -> dict[str, float]:
        """The numbers of the last reading that could be read, by name, for any logger; empty before the first."""
        self._fetch()
        return named(self.columns, self.records[-1][1]) if self.records else {}

    @property
    def status(self) -> Status:
        """The state of the run at the last reading: steady, growing or failing; its `str` is a sentence."""
        self._fetch()
        return self.states.status

    def diagnosis(self) -> Status | None:
        """The status, unless the run is steady."""
        return None if self.status.state == "steady" else self.status

    def write(self, path: str | Path) -> int:
        """Append the readings that were not written yet to a file, one JSON object per line; how many they were.

        Of several processes, which all read the same, the first writes.
        """
        self._fetch()
        new = list(self.records)[len(self.records) - self.unwritten :] if self.processes.rank == 0 else []
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(with_nulls(self._reading(*record))) + "\n" for record in new)
        self.unwritten = 0
        return len(new)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to read on as if it had never stopped, as JSON."""
        self._fetch()
        history = [with_nulls(row.tolist()) for row in self.table.rows]
        return {"step": self.count, "history": history, "states": self.states.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Rows of another length are those of a version that read other numbers.
        kept = [row for row in state["history"] if len(row) == len(self.table.names)]
        rows = [[float("nan") if value is None else value for value in row] for row in kept]
        self.table.rows.clear()
        self.table.rows.extend(torch.tensor(row, dtype=torch.float64) for row in rows)
        if "states" in state:  # Not in those of a version that had none.
            self.states.load_state_dict(state["states"])
        self.seek(state["step"])

    @torch.no_grad()
    def _read(self, number: int) -> bool:
        """Keep the numbers of the step that is over, one vector on the device."""
        values, call = self.hooks.values(), self.hooks.call
        if not values:
            if not self.warned:
                warnings.warn(UNSEEN.format(name=type(self.network).__name__), stacklevel=3)
            self.warned = True
            return False
        if self.probe_every is not None and number % self.probe_every == 0 and call is not None:
            changes = output_change(self.network, call, seed=number, rank=self.processes.rank)
            if changes is not None:
                (changes,) = self.processes.gather([changes])
                values |= {"robustness": changes.mean(), "robustness_max": changes.max()}
        self.pending.append((number, self.table.row(values)))
        if len(self.pending) >= KEEP:
            self._fetch()
        return True

    def _fetch(self) -> None:
        """Bring what is waiting on the device, in a transfer for readings and one for losses, and judge it in order."""
        steps, losses = [step for step, _ in self.losses], fetch([loss for _, loss in self.losses])
        waiting, self.losses = deque(zip(steps, losses, strict=True)), []
        pending, self.pending = self.pending, []
        rows = torch.stack([row for _, row in pending]).cpu().double() if pending else ()
        for (step, _), row in zip(pending, rows, strict=True):
            while waiting and waiting[0][0] <= step:
                self.states.add_loss(waiting.popleft()[1])
            self.table.rows.append(row)
            self.records.append((step, torch.cat([row, self.table.oscillation()])))
            self.unwritten = min(self.unwritten + 1, KEEP)
            self.states.update(step, named(self.table.names, row), list(self.hooks.order))
        for _, loss in waiting:
            self.states.add_loss(loss)

    def _reading(self, step: int, row: Tensor) -> dict[str, float]:
        return {"step": step, **named(self.columns, row)}


def choose(
    model: nn.Module, sites: Iterable[SkipSite | int] | None, example_inputs: ExampleInputs | None
) -> tuple[nn.Module, list[SkipSite]]:
    """The network and its skips to read: those asked for or found, else those that are scaled."""
    refuse_other_objects(model)
    try:
        return choose_sites(model, sites, example_inputs)[:2]
    except ValueError:
        scaled = {hook.site.index: hook.site for _, hook in attached_hooks(model)}
        if not scaled or sites is not None:
            raise
        return scaled_networks(model)[0][0], [scaled[index] for index in sorted(scaled)]


def refuse_compiled(model: nn.Module, *, thorough: bool = True) -> None:
    """Raise if the model is compiled: compiled code does not call hooks that were attached later."""
    compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )
    if compiled or (thorough and compiled_elsewhere(model)):
        raise ValueError(
            f"{type(model).__name__} is compiled, and compiled code calls no hooks: SkipMonitor would read nothing. "
            "Monitor an uncompiled run; what it shows holds for the compiled one."
        )
