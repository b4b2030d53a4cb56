"""Conditions of a network (labels, text), how training drops them, and classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Predictor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Condition:
    """The conditions of some images, those that the network takes. Shape: labels (B,), text (B, L, D)."""

    labels: Tensor | None = None
    text: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Condition:
        return Condition(*(None if value is None else function(value) for value in (self.labels, self.text)))

    def to(self, device: torch.device) -> Condition:
        return self.map(lambda value: value.to(device))

    def __getitem__(self, rows: slice | Tensor) -> Condition:
        return self.map(lambda value: value[rows])

    def chunk(self, parts: int) -> list[Condition]:
        """Equal parts in order."""
        columns = [[None] * parts if value is None else value.chunk(parts) for value in (self.labels, self.text)]
        return [Condition(*part) for part in zip(*columns, strict=True)]

    def followed_by(self, other: Condition) -> Condition:
        """The conditions of these images and then of the others, which have the same kinds."""
        pairs = ((self.labels, other.labels), (self.text, other.text))
        return Condition(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs))

    @property
    def first(self) -> Tensor:
        """What tells the number of images and the device."""
        return next(value for value in (self.labels, self.text) if value is not None)


NOTHING = Condition()

MOST_TOGETHER = 16
"""Images that a CPU samples with and without their condition in one pass; measured by benchmarks/sample.py."""


@dataclass(frozen=True)
class Conditioning:
    """How a network takes its condition, and what stands for none. Shape: empty_text (L, D)."""

    names: tuple[str, str] | None
    """The keywords of labels and of text in the network's forward; None = it takes them after image and time."""
    takes_labels: bool = False
    takes_text: bool = False
    no_label: int | None = None
    empty_text: Tensor | None = None
    drop: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop must be a probability below 1, got {self.drop}")

    def of(self, batch: Any) -> Condition:
        """The condition of a batch, or of picked examples: what the network takes and no more."""
        return Condition(batch.labels if self.takes_labels else None, batch.text if self.takes_text else None)

    def predictor(self, model: Callable[..., Any], condition: Condition = NOTHING) -> Predictor:
        """The network as a function of image and time."""
        if self.names is None:
            taken = [value for value in (condition.labels, condition.text) if value is not None]
            return noise_predictor(lambda x, t: model(x, t, *taken))
        values = zip(self.names, (condition.labels, condition.text), strict=True)
        given = {name: value for name, value in values if value is not None}
        return noise_predictor(partial(model, **given) if given else model)

    def drop_condition(self, condition: Condition, chosen: Tensor) -> Condition:
        """The condition with none in its place where chosen. Shape: chosen (B,), bool."""
        labels, text = condition.labels, condition.text
        if labels is not None and self.no_label is not None:
            labels = labels.masked_fill(chosen, self.no_label)
        if text is not None and self.empty_text is not None:
            text = torch.where(chosen.view(-1, 1, 1), self.empty_text.to(text), text)
        return Condition(labels, text)

    def guided(self, model: Callable[..., Any], condition: Condition, guidance: float) -> Predictor:
        """ε(∅) + w·(ε(c) − ε(∅)), with both in one batch if it is small; w = 1 is the condition alone and 0 is none."""
        if guidance == 1 or condition == NOTHING:
            return self.predictor(model, condition)
        everywhere = torch.ones(len(condition.first), dtype=torch.bool, device=condition.first.device)
        none = self.drop_condition(condition, everywhere)
        if guidance == 0:
            return self.predictor(model, none)
        free, bound = self.predictor(model, none), self.predictor(model, condition)
        both, in_one_pass = self.predictor(model, none.followed_by(condition)), prefers_one_pass(model, condition)

        def guide(x: Tensor, t: Tensor) -> Tensor:
            if in_one_pass:
                first, second = both(torch.cat([x, x]), torch.cat([t, t])).chunk(2)
                return torch.lerp(first, second, guidance)
            return torch.lerp(free(x, t), bound(x, t), guidance)

        return guide


def prefers_one_pass(model: Callable[..., Any], condition: Condition) -> bool:
    """Whether twice the batch takes less than two passes: not on a CPU, whose caches a large batch leaves."""
    # Shards need as many passes in every process, whose batches may differ in size.
    sharded = hasattr(model, "unshard")
    return sharded or not condition.first.is_cpu or len(condition.first) <= MOST_TOGETHER


def noise_predictor(model: Callable[..., Any]) -> Predictor:
    """A predictor of any network called as model(x, t): U-ViT returns a tensor, diffusers an object with `.sample`.

    Conditions come first: `noise_predictor(functools.partial(model, y=labels))`. Call `model.eval()` before sampling.

    >>> from types import SimpleNamespace
    >>> noise_predictor(lambda x, t: SimpleNamespace(sample=x + t))(torch.ones(1), torch.ones(1))
    tensor([2.])
    """

    def predict(x: Tensor, t: Tensor) -> Tensor:
        output = model(x, t)
        return output if isinstance(output, Tensor) else output.sample

    return predict
