"""Scale the residual branches of a U-ViT instead of its skips: the controls of the paper's Table 3, not its method."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from .apply import refuse_wrapped
from .hooks import NetworkHook, detach_hooks
from .methods import KeptBuffers

Model = TypeVar("Model", bound=nn.Module)
NAME = "block_scaling"


class BlockScaling(KeptBuffers):
    """One factor per residual branch, x + factor·f(x): the constant tau, or learnable from 0 (ReZero)."""

    def __init__(self, branches: int, tau: float | None) -> None:
        super().__init__()
        if tau is None:
            self.factors = nn.Parameter(torch.zeros(branches))
        else:
            self.register_buffer("factors", torch.full((branches,), float(tau), device="cpu"))


class BranchHook(NetworkHook):
    """Forward hook on a residual branch."""

    def __init__(self, network: nn.Module, scaling: BlockScaling, branch: int) -> None:
        super().__init__(network, NAME, scaling)
        self.branch = branch

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * self.held.factors[self.branch]


def scale_blocks(model: Model, method: str, *, tau: float | None = None) -> Model:
    """Scale every residual branch of a U-ViT: "rezero" (learnable from 0) or "stable" (the constant `tau`)."""
    refuse_wrapped(model)
    check_method(method, tau)
    branches = residual_branches(model)
    unscale_blocks(model)
    scaling = BlockScaling(len(branches), tau).to(next(model.parameters()).device)
    model.add_module(NAME, scaling)
    for number, branch in enumerate(branches):
        hook = BranchHook(model, scaling, number)
        hook.handle = branch.register_forward_hook(hook)
    return model


def unscale_blocks(model: Model) -> Model:
    """Remove what `scale_blocks` added; does nothing on a plain model."""
    if isinstance(model._modules.get(NAME), BlockScaling):
        detach_hooks(model, BranchHook)
        delattr(model, NAME)
    return model


def check_method(method: str, tau: float | None) -> None:
    if method not in ("rezero", "stable"):
        raise ValueError(f'unknown block scaling {method!r}; use "rezero" or "stable" (with tau=0.1 or 0.3)')
    if method == "rezero" and tau is not None:
        raise ValueError('tau belongs to "stable"; "rezero" learns its factors from 0')
    if method == "stable" and (tau is None or not math.isfinite(tau) or tau <= 0):
        raise ValueError(f'"stable" needs tau, a positive number such as 0.1 or 0.3, got {tau}')


def residual_branches(model: nn.Module) -> list[nn.Module]:
    """The attention and MLP of every block of a U-ViT, in forward order."""
    if not all(hasattr(model, name) for name in ("in_blocks", "mid_block", "out_blocks")):
        raise ValueError(f"scale_blocks is for UViT; {type(model).__name__} has no in_blocks, mid_block and out_blocks")
    blocks = [*model.get_submodule("in_blocks").children(), model.get_submodule("mid_block")]
    blocks += model.get_submodule("out_blocks").children()
    return [block.get_submodule(name) for block in blocks for name in ("attn", "mlp")]
