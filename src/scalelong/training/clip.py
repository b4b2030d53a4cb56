"""AdaGC: each tensor's gradient is kept close to the norm that it usually has (Wang et al. 2025, arXiv 2502.11034)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..utils.runtime import local, whole

START = 100  # Steps in which all gradients are clipped together, and every average is the least norm seen.
DECAY = 0.98  # Of the averages after that.


class AdaptiveClip:
    """Called in place of `clip_grad_norm_`: gradient i is scaled to at most ratio·γ_i.

    `norms` are the γ_i, the moving averages of what was let through: γ ← DECAY·γ + (1 − DECAY)·‖clipped gradient‖.
    """

    def __init__(self, ratio: float, parameters: Sequence[nn.Parameter]) -> None:
        self.ratio, self.steps = ratio, 0
        self.norms = torch.full((len(parameters),), torch.inf, device=parameters[0].device)

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter], limit: float, *, foreach: bool = True) -> Tensor:
        """Clip the gradients; returns their common norm before. If it is not finite, the averages stay."""
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        norms = whole(torch.stack([torch.linalg.vector_norm(one) for one in gradients])).float()
        total = torch.linalg.vector_norm(norms)
        if self.steps < START:
            factors = (limit / total).clamp_max(1.0).expand_as(norms)
            moved = torch.minimum(self.norms, norms * factors)
        else:
            factors = (self.ratio * self.norms / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1.0)
            moved = DECAY * self.norms + (1 - DECAY) * norms * factors
            moved = torch.where(self.norms.isfinite(), moved, norms)
        for gradient, factor in zip(gradients, factors, strict=True):
            local(gradient).mul_(factor)
        # Paper: every norm counts; here: not one of 0 (a dead gate), which the tensor could never come back from.
        self.norms = torch.where((norms > 0) & total.isfinite(), moved, self.norms)
        self.steps += 1
        return total

    def state_dict(self) -> dict[str, Any]:
        """As JSON; a tensor that had no gradient yet has no average."""
        return {"steps": self.steps, "norms": [one if math.isfinite(one) else None for one in self.norms.tolist()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.norms = self.norms.new_tensor([math.inf if one is None else one for one in state["norms"]])
