"""How good drawn images are, every n steps of a run: the trainer's part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from ..config.schema import EvaluationConfig, Weights
from .ema import EMA
from .logger import RunLogger

MakeEvaluator = Callable[..., Any]
"""`scalelong.evaluation.Evaluator.open`, or what is called like it."""


class Quality:
    """Has an evaluator look at the network with its averaged and its own weights, and writes down what it finds."""

    def __init__(
        self,
        evaluator: Any,
        config: EvaluationConfig,
        network: nn.Module,
        ema: EMA,
        journal: RunLogger,
        *,
        sharded: bool,
    ) -> None:
        self.evaluator, self.config, self.network, self.ema = evaluator, config, network, ema
        self.journal, self.sharded = journal, sharded

    def begin(self, step: int) -> None:
        """The run goes on from a step: forget what was found later; before any process may evaluate again."""
        if self.journal.is_main:
            self.evaluator.begin(step)

    def evaluate(self, step: int, told: Callable[[], bool]) -> bool:
        """Whether it was done: False, and nothing is written to the log, if a process was told to stop."""
        self.network.eval()
        with self.journal.watch.paused(), nullcontext() if self.sharded else plain(self.network):
            numbers = self._numbers(step, told)
        self.network.train()
        self._tidy()
        if numbers is None:
            return False
        self.journal.record(step, numbers)
        return True

    def _numbers(self, step: int, told: Callable[[], bool]) -> dict[str, float] | None:
        numbers: dict[str, float] = {}
        for weights in self.config.chosen:
            with self._with(weights):
                found = self.evaluator.evaluate(self.network, step, weights, told)
            if found is None:
                return None
            numbers |= found.numbers()
            self.journal.note(f"step {step}, {found}")
        return numbers

    def _with(self, weights: Weights) -> AbstractContextManager[Any]:
        return self.ema.swap(self.network) if weights == "ema" else nullcontext()

    def _tidy(self) -> None:
        """All processes have their result by now, so that none waits for long."""
        self.journal.accelerator.wait_for_everyone()
        if self.journal.is_main:
            self.evaluator.tidy()


@contextmanager
def plain(network: nn.Module) -> Iterator[None]:
    """The network as `scalelong evaluate` calls it: in float32 and not compiled."""
    # Accelerate hides the class's forward behind one in mixed precision, `compile` that of the whole call.
    hidden = {name: network.__dict__.pop(name) for name in ("forward", "_compiled_call_impl") if name in vars(network)}
    try:
        yield
    finally:
        network.__dict__.update(hidden)
