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
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..skips import SkipSite
from ..skips.apply import scaled_networks
from ..skips.find import Choice, ExampleInputs, choose_sites, compiled_elsewhere, refuse_other_objects
from ..skips.hooks import attached_hooks
from .diagnosis import Diagnosis, Finder
from .oscillation import beyond_noise, oscillation_index, swing_index
from .readings import Layout, Reading, flat, with_nulls
from .robustness import output_change
from .team import team_of, unwrapped
from .updates import UpdateWatch
from .watching import Watch

KEEP = 1000
"""Readings that are kept; the older ones can only be had by writing them in time."""
ENOUGH = 5
"""Readings before there is an oscillation index."""
SURE = 8
"""Readings before a diagnosis is made: with fewer, a single jump counts too much."""


class SkipMonitor:
    """Reads every `every` steps what the long skips and the blocks of a model do, and every `probe_every` steps how
    robust its output is; `window` readings make an oscillation index.

    A monitored run is the same to the bit as one without. `sites` and `example_inputs` are those of `scale_skips`, for
    models that no family knows; `scaler` is the gradient scaler of fp16, if there is one. What is read stays on the
    device until `readings()`, `latest`, `diagnosis()` or `write()` asks for it. A model wrapped by DDP or FSDP is read
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
    ) -> None:
        check_intervals(every, probe_every, window)
        self.every, self.probe_every, self.window = every, probe_every, window
        self.model, self.team = unwrapped(model), team_of(model)
        refuse_compiled(self.model)
        choice = choose(self.model, sites, example_inputs)
        self.network = choice.network
        self.watch = Watch(choice.network, choice.sites, scaler, self.team)
        self.updates = UpdateWatch(self.watch.blocks)
        self.layout = Layout(tuple((site.index, site.consumer) for site in choice.sites), tuple(self.watch.blocks))
        self.features = [self.layout.series.index(name) for name in self.layout.noise]
        self.finder = Finder(self.layout)
        self.count = 0
        self.running = self.armed = self.warned = False
        self.pending: list[tuple[int, Tensor]] = []
        self.history: deque[Tensor] = deque(maxlen=window)
        self.records: deque[tuple[int, list[float], list[float]]] = deque(maxlen=KEEP)
        self.unwritten = 0

    def __enter__(self) -> SkipMonitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> SkipMonitor:
        """Watch from the next step on, as on entering the context."""
        self.running = True
        self.seek(self.count)
        return self

    def stop(self) -> None:
        """Leave the model alone; what was read stays at hand."""
        self._disarm()
        self.running = False

    def step(self, number: int | None = None) -> bool:
        """Call it after the optimiser's step, whose `number` counts from 1 unless given; whether the step was read."""
        if not self.running:
            raise RuntimeError("this SkipMonitor is not watching: use `with SkipMonitor(model) as monitor:`")
        number = self.count + 1 if number is None else number
        read = self.armed and self._take(number)
        self.seek(number)
        return read

    def seek(self, number: int) -> None:
        """Go on as after step `number`, after a rollback for instance."""
        self.count = number
        self._disarm()
        if self.running and (number + 1) % self.every == 0:
            refuse_compiled(self.model, thorough=False)
            self.watch.attach()
            self.updates.attach()
            self.armed = True

    def readings(self) -> list[Reading]:
        """The last readings, up to a thousand, oldest first."""
        self._fetch()
        return [self._reading(*record) for record in self.records]

    @property
    def latest(self) -> dict[str, float]:
        """The last reading as a flat dict of numbers, for any logger; empty before the first."""
        self._fetch()
        return flat(*self._named(*self.records[-1][1:])) if self.records else {}

    def diagnosis(self) -> Diagnosis | None:
        """Which block and which skip oscillated first; None as long as none does. Its `str` is a sentence."""
        self._fetch()
        return self.finder.found

    def write(self, path: str | Path) -> int:
        """Append the readings that were not written yet to a file, one JSON object per line; how many they were.

        Of several processes, which all read the same, the first writes.
        """
        self._fetch()
        new = list(self.records)[len(self.records) - self.unwritten :] if self.team.rank == 0 else []
        lines = [json.dumps(with_nulls(self._reading(*record).as_dict()), allow_nan=False) for record in new]
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        self.unwritten = 0
        return len(lines)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to read on as if it had never stopped, as JSON."""
        self._fetch()
        history = [with_nulls(row.tolist()) for row in self.history]
        return {"step": self.count, "history": history, "finder": self.finder.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Rows of another length are those of a version that read other numbers.
        kept = [row for row in state["history"] if len(row) == len(self.layout.names)]
        rows = [[float("nan") if value is None else value for value in row] for row in kept]
        self.history = deque((torch.tensor(row, dtype=torch.float64) for row in rows), maxlen=self.window)
        self.finder.load_state_dict(state["finder"])
        self.seek(state["step"])

    def _disarm(self) -> None:
        self.watch.detach()
        self.updates.detach()
        self.armed = False

    @torch.no_grad()
    def _take(self, number: int) -> bool:
        """Keep the numbers of the step that was watched, one vector on the device."""
        values = self.watch.values() | self.updates.values
        if not values:
            self._warn_unseen()
            return False
        if self.probe_every is not None and number % self.probe_every == 0:
            values |= self._probe(number)
        device = next(iter(values.values())).device
        missing = torch.full((), torch.nan, device=device)
        numbers = [values.get(name, missing).to(device, torch.float32) for name in self.layout.names]
        self.pending.append((number, torch.stack(numbers)))
        if len(self.pending) >= KEEP:
            self._fetch()
        return True

    def _probe(self, number: int) -> dict[str, Tensor]:
        call, rank = self.watch.call, self.team.rank
        changes = None if call is None else output_change(self.network, call, seed=number, rank=rank)
        if changes is None:
            return {}
        (changes,) = self.team.gather([changes])
        return {"robustness": changes.mean(), "robustness_max": changes.max()}

    def _fetch(self) -> None:
        """Bring what is waiting on the device, in a single transfer."""
        if not self.pending:
            return
        steps, rows = zip(*self.pending, strict=True)
        self.pending = []
        for step, row in zip(steps, torch.stack(rows).cpu().double(), strict=True):
            self._digest(step, row)

    def _digest(self, step: int, row: Tensor) -> None:
        self.history.append(row)
        window = torch.stack(list(self.history))
        series = window[:, : len(self.layout.series)]
        moved, swings = oscillation_index(series), self._swings(window)
        if len(series) < min(ENOUGH, self.window):
            moved = torch.full_like(moved, torch.nan)
        if len(series) < min(SURE, self.window):
            swings = torch.full_like(swings, torch.nan)
        self.records.append((step, row.tolist(), moved.tolist()))
        self.unwritten = min(self.unwritten + 1, KEEP)
        numbers, oscillation = self._named(row.tolist(), moved.tolist())
        swung = dict(zip(self.layout.series, swings.tolist(), strict=True))
        self.finder.update(step, numbers, oscillation=oscillation, swings=swung, order=list(self.watch.order))

    def _swings(self, window: Tensor) -> Tensor:
        """How far each series goes back and forth; of features, beyond what the draw of the batches explains."""
        count, features = len(self.layout.series), self.features
        swings = swing_index(window[:, :count])
        swings[features] = beyond_noise(swings[features], window[:, count : count + len(features)].nanmean(dim=0))
        return swings

    def _named(self, row: list[float], moved: list[float]) -> tuple[dict[str, float], dict[str, float]]:
        return dict(zip(self.layout.names, row, strict=True)), dict(zip(self.layout.series, moved, strict=True))

    def _reading(self, step: int, row: list[float], moved: list[float]) -> Reading:
        return self.layout.reading(step, *self._named(row, moved))

    def _warn_unseen(self) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"SkipMonitor saw no training pass through {type(self.network).__name__}: it was compiled after the "
                "monitor was made, or another copy of it is trained. Monitor the model that is trained, uncompiled.",
                stacklevel=4,
            )


def check_intervals(every: int, probe_every: int | None, window: int) -> None:
    if every < 1 or window < 2:
        raise ValueError(f"every must be at least 1 and window at least 2, got {every=}, {window=}")
    if probe_every is not None and (probe_every < 1 or probe_every % every):
        raise ValueError(f"probe_every must be a multiple of every={every}, or None to never probe, got {probe_every}")


def choose(model: nn.Module, sites: Iterable[SkipSite | int] | None, example_inputs: ExampleInputs | None) -> Choice:
    """The skips to read: those asked for or found, else those that are scaled."""
    refuse_other_objects(model)
    try:
        return choose_sites(model, sites, example_inputs)
    except ValueError:
        scaled = {hook.site.index: hook.site for _, hook in attached_hooks(model)}
        if not scaled or sites is not None:
            raise
        found = [scaled[index] for index in sorted(scaled)]
        return Choice(scaled_networks(model)[0][0], found, max(scaled))


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
