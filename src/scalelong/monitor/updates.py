"""How far an optimiser moves the weights of each block: read around its step, whoever calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class UpdateWatch:
    """Reads the optimiser steps during which it is attached; only then is there a copy of the weights.

    Hooks of torch on every optimiser, so that nobody has to hand theirs over; those of other models are left alone.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.blocks = blocks
        self.values: dict[str, Tensor] = {}
        self.before: dict[str, tuple[list[Tensor], Tensor]] = {}
        self.handles = ExitStack()

    def attach(self) -> None:
        for register, hook in (
            (register_optimizer_step_pre_hook, self._remember),
            (register_optimizer_step_post_hook, self._compare),
        ):
            self.handles.callback(register(hook).remove)

    def detach(self) -> None:
        self.handles.close()
        self.values, self.before = {}, {}

    def _remember(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # What a fused optimiser has yet to divide the gradients by, under a gradient scaler.
        scale = getattr(optimizer, "grad_scale", None)
        for name, weights in self._blocks_of(optimizer).items():
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            if gradients:
                size = norm_of(gradients)
                self.values[f"block/{name}/gradient"] = size if scale is None else size / scale
            self.before[name] = [weight.detach().clone() for weight in weights], norm_of(weights)

    def _compare(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for name, weights in self._blocks_of(optimizer).items():
            if name not in self.before:
                continue
            moved, size = self.before.pop(name)
            for old, weight in zip(moved, weights, strict=True):
                old.sub_(weight.detach())
            self.values[f"block/{name}/update"] = norm_of(moved) / size

    def _blocks_of(self, optimizer: Optimizer) -> dict[str, list[nn.Parameter]]:
        """The weights of each block that this optimiser moves."""
        own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        moved = {name: [w for w in block.parameters() if id(w) in own] for name, block in self.blocks.items()}
        return {name: weights for name, weights in moved.items() if weights}


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all of them together, over all processes where they are sharded. Shape: ()."""
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32) for tensor in tensors]
    total = torch.stack([whole(found).square() for found in norms]).sum()
    return total.sqrt()


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
