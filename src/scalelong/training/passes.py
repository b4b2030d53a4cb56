"""The forward and backward passes of a step, over the parts into which a process cuts its share of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .loss import DiffusionLoss, NoisyBatch
from .sharding import no_sync


@dataclass(frozen=True)
class Passes:
    """`model` is the network among its processes, which the gradients are exchanged with; `network` is it alone."""

    objective: DiffusionLoss
    model: nn.Module
    network: nn.Module
    accelerator: Any
    sharded: bool

    def backward(self, parts: list[NoisyBatch]) -> Tensor:
        """Accumulate the gradients of all parts, exchanged between processes with the last; returns the mean loss."""
        losses = []
        for part in parts[:-1]:
            with no_sync(self.network) if self.sharded else self.accelerator.no_sync(self.model):
                losses.append(self._backward(part))
        losses.append(self._backward(parts[-1]))
        return torch.stack(losses).mean()

    def again(self, parts: list[NoisyBatch]) -> list[Callable[[], Tensor]]:
        """The forward passes once more, to look for what went wrong in them; without the other processes."""
        if self.sharded:
            return [lambda: self._mean_loss(parts)]
        return [partial(self.objective.loss, self.network, part) for part in parts]

    def _backward(self, part: NoisyBatch) -> Tensor:
        loss = self.objective.loss(self.model, part)
        self.accelerator.backward(loss)
        return loss.detach()

    def _mean_loss(self, parts: list[NoisyBatch]) -> Tensor:
        """With shards a pass takes every process, so that none may end before the others: they do all parts at once.

        Gradients cannot be had apart from an exchange: there are none then.
        """
        self.network.zero_grad()
        with torch.no_grad():
            return torch.stack([self.objective.loss(self.network, part) for part in parts]).mean()
