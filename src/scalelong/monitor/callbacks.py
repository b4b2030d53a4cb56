"""The monitor for loops that are someone else's: Accelerate and Lightning, neither of which is imported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from .monitor import SkipMonitor

logger = logging.getLogger(__name__)


class AccelerateMonitor(SkipMonitor):
    """A SkipMonitor that follows an Accelerator: it counts only real updates while gradients accumulate, knows the
    gradient scaler, and logs its numbers to the accelerator's trackers.

        with AccelerateMonitor(accelerator, model) as monitor:
            ...  # accelerator.backward(loss); optimizer.step()
            monitor.step()
    """

    def __init__(self, accelerator: Any, model: nn.Module, **options: Any) -> None:
        super().__init__(model, scaler=getattr(accelerator, "scaler", None), **options)
        self.accelerator = accelerator

    def step(self, number: int | None = None) -> bool:
        if not self.accelerator.sync_gradients:
            return False
        read = super().step(number)
        if read:
            self.accelerator.log(self.latest, step=self.count)
            tell(self)
        return read


class LightningMonitor:
    """Lightning's hooks around a SkipMonitor; `options` are those of SkipMonitor.

    A plain class, because Lightning need not be there; make it a callback by naming Lightning's own second:

        class WatchSkips(LightningMonitor, lightning.Callback): ...

        trainer = lightning.Trainer(callbacks=[WatchSkips(every=50, probe_every=None)])
    """

    state_key = "scalelong.SkipMonitor"

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.monitor: SkipMonitor | None = None
        self.saved: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        # The module as the strategy wrapped it, which says which processes train it together.
        model = getattr(trainer, "model", None) or pl_module
        self.monitor = SkipMonitor(model, scaler=scaler, **self.options).start()
        if self.saved is not None:
            self.monitor.load_state_dict(self.saved)
        self.monitor.seek(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # While gradients accumulate there are batches without an update.
        if self.monitor is None or trainer.global_step == self.monitor.count:
            return
        if self.monitor.step(trainer.global_step):
            for destination in trainer.loggers:
                destination.log_metrics(self.monitor.latest, step=trainer.global_step)
            tell(self.monitor)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is not None:
            self.monitor.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.saved = state_dict


def tell(monitor: SkipMonitor) -> None:
    """Log the diagnosis, at the reading that led to it, in the first process."""
    found = monitor.diagnosis()
    if found is not None and found.step == monitor.count and monitor.team.rank == 0:
        logger.warning("%s", found)
