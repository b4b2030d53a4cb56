"""The block gain of a real network: how much the path through each long skip can enlarge a change of the input.

The path through skip i is b_1∘…∘b_i∘a_i∘…∘a_1: the blocks a before the skip leaves, joined to the blocks b after it
enters. P_i is the spectral norm of its Jacobian, found by power iteration. Theorem 3.4 bounds it by M_0^i, so that the
network's change is at most Σ κ_i·P_i plus what the middle passes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..skips import Channels, Inline, SkipSite
from ..skips.hooks import hooks_detached
from ..skips.inline import Interceptor, register
from ..skips.record import unchanged
from ..skips.site import Arguments, Keywords, argument_of

Call = Callable[[Tensor], Tensor]
Progress = Callable[[int, int], None]
"""Called with the steps that are done, and the most that there may be."""

PASSES_OF_GRAPH, PASSES_OF_STEP, FEWEST_STEPS = 6, 6, 2
"""What it takes to set the paths up and to follow them once, in forward passes of as many rows: a guess, not
measured. Before two steps there is nothing to compare."""


@dataclass(frozen=True)
class BlockGain:
    """P_1 … P_N, outermost first, and what they say about κ."""

    path_gains: list[float]
    skips: tuple[int, ...] | None = None
    """Which skips they are of, from 1, where there was no time for all; None = all."""
    settled: bool = True
    """Whether they were found to the tolerance; else they are lower bounds."""
    seconds: float = 0.0
    """What a step would have taken, if that was too long for any path."""

    @property
    def gain(self) -> float:
        """M_0: the largest (P_i/P_1)^{1/(i−1)}, what one more pair of blocks multiplies the path by; P_1 if N = 1.

        NaN if it was not measured, and for a network whose last layer starts at zero, through which no path is seen.
        """
        if not self.path_gains or self.path_gains[0] == 0:
            return math.nan
        first, *others = self.path_gains
        skips = self.skips or range(1, len(self.path_gains) + 1)
        return max(((p / first) ** (1 / (i - 1)) for i, p in zip(skips[1:], others, strict=True)), default=first)

    @property
    def largest_kappa(self) -> float:
        """The largest κ ≤ 1 with κ·M_0 ≤ 1: no term κ^{i−1}·P_i of the bound then exceeds the outermost, P_1."""
        return 1 / self.gain if len(self.path_gains) > 1 and self.gain > 1 else 1.0


def measure_gain(
    model: nn.Module,
    call: Call,
    x: Tensor,
    sites: list[SkipSite],
    *,
    tolerance: float = 2e-3,
    max_steps: int = 100,
    generator: Generator | None = None,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> BlockGain:
    """P_i of every site, the largest over the inputs x, without any scaling of the skips. Shape: x (B, …).

    `call(x)` runs the model on inputs like x; it is given every input N times, so that row i·B + b carries what goes
    through skip i of input b, and all paths are iterated at once. Where that would take more than about `seconds`, the
    first and the last path are followed for one input, for as many steps as there is time for, or none at all.
    """
    # The fused attention kernels have no second derivatives.
    with unchanged(model), hooks_detached(model), sdpa_kernel(SDPBackend.MATH):
        begun = time.perf_counter()
        chosen, x, pass_seconds = affordable(call, sites, x, seconds)
        if not chosen:
            return BlockGain([], seconds=PASSES_OF_STEP * 2 * pass_seconds)
        paths = Paths(model, call, chosen, x.repeat(len(chosen), *[1] * (x.ndim - 1)))
        gains, settled = power_iteration(paths, tolerance, max_steps, generator, begun + seconds, progress)
    skips = None if len(chosen) == len(sites) else (1, len(sites))
    return BlockGain(gains.reshape(len(chosen), -1).amax(1).tolist(), skips, settled)


def affordable(call: Call, sites: list[SkipSite], x: Tensor, seconds: float) -> tuple[list[SkipSite], Tensor, float]:
    """The sites and inputs that there is time for, and the seconds of a forward pass of one input."""
    if seconds == math.inf:
        return sites, x, 0.0
    with torch.no_grad():
        begun = time.perf_counter()
        call(x[:1])
        pass_seconds = time.perf_counter() - begun
    rows = seconds / (pass_seconds * (PASSES_OF_GRAPH + FEWEST_STEPS * PASSES_OF_STEP))
    ends = sites if len(sites) == 1 else [sites[0], sites[-1]]
    for chosen, inputs in ((sites, x), (sites, x[:1]), (ends, x[:1])):
        if len(chosen) * len(inputs) <= rows:
            return chosen, inputs, pass_seconds
    return [], x, pass_seconds


def power_iteration(
    paths: Paths, tolerance: float, max_steps: int, generator: Generator | None, end: float, progress: Progress | None
) -> tuple[Tensor, bool]:
    """The largest singular value of every row's path, and whether all settled in time. Shape: (rows,), float64."""
    change = torch.randn(paths.x.shape, generator=generator).to(paths.x)
    gains = torch.zeros(len(change), dtype=torch.float64)
    longest = 0.0
    for step in range(max_steps):
        begun = time.perf_counter()
        if step >= FEWEST_STEPS and begun + longest > end:
            return gains, False
        if progress is not None:
            progress(step, max_steps)
        change = change / row_norms(change).clamp(min=torch.finfo(change.dtype).tiny)
        moved = paths.push(change)
        before, gains = gains, row_norms(moved).flatten().cpu().double()
        if torch.all((gains - before).abs() <= tolerance * gains):
            return gains, True
        change = paths.pull(moved)
        longest = max(longest, time.perf_counter() - begun)
    return gains, False


def row_norms(x: Tensor) -> Tensor:
    """Shape: (B, …) → (B, 1, …)."""
    return x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))


class Paths:
    """The paths through every skip as linear maps at x: `push` is their Jacobian, `pull` its transpose, row by row.

    The network runs once. Each skip is cut where it enters: what arrives there is one end of the graph, what the
    consumer reads instead is the other.
    """

    def __init__(self, model: nn.Module, call: Call, sites: list[SkipSite], x: Tensor) -> None:
        self.x, self.order = x.detach().requires_grad_(), [site.index for site in sites]
        self.left: dict[int, Tensor] = {}
        self.entered: dict[int, Tensor] = {}
        with torch.enable_grad(), ExitStack() as hooks:
            for site in sites:
                consumer = model.get_submodule(site.consumer)
                if isinstance(site.entry, Inline):
                    for handle in register(consumer, Interceptor(site.entry, partial(self._entering, site))):
                        hooks.enter_context(handle)
                    continue
                hooks.enter_context(consumer.register_forward_pre_hook(partial(self._cut, site), with_kwargs=True))
            self.output = call(self.x)
            # Jᵀw is linear in w, so that its derivative in a direction v, by a second backward pass, is J·v.
            self.probe = torch.zeros_like(self.output).requires_grad_()
            self.pulled = self.pull(self.probe, create_graph=True)

    def push(self, change: Tensor) -> Tensor:
        """Jacobian-vector products. Shape: that of x → that of the output."""
        return torch.autograd.grad(self.pulled, self.probe, change, retain_graph=True)[0]

    def pull(self, change: Tensor, *, create_graph: bool = False) -> Tensor:
        """Vector-Jacobian products: back to where the skips enter, then from where they left. Shape: output → x."""
        keep = {"retain_graph": True, "create_graph": create_graph}
        back = torch.autograd.grad(self.output, list(self.entered.values()), change, **keep)
        own = [grad * self._own_rows(index, grad) for index, grad in zip(self.entered, back, strict=True)]
        return torch.autograd.grad(list(self.left.values()), self.x, own, **keep)[0]

    def _own_rows(self, index: int, like: Tensor) -> Tensor:
        """1 for the rows that belong to skip `index`, 0 for those of other skips. Shape: (rows, 1, …)."""
        count = len(self.x) // len(self.order)
        rows = torch.arange(len(self.x), device=like.device) // count == self.order.index(index)
        return rows.to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))

    def _cut(self, site: SkipSite, module: nn.Module, args: Arguments, kwargs: Keywords) -> Any:
        """Forward pre-hook: replaces the skip that the consumer is called with."""
        assert not isinstance(site.entry, Inline), "it is cut at the join"
        argument = argument_of(module, site.entry)
        changed = argument.changed(args, kwargs, partial(self._replaced, site))
        assert changed is not None, f"{site.consumer} was called without {argument}"
        return changed

    def _replaced(self, site: SkipSite, value: Tensor) -> Tensor:
        entry = site.entry
        if not isinstance(entry, Channels):
            return self._entering(site, value)
        trunk, skip, rest = torch.tensor_split(value, (entry.start, entry.stop), dim=entry.dim)
        return torch.cat([trunk, self._entering(site, skip), rest], dim=entry.dim)

    def _entering(self, site: SkipSite, skip: Tensor) -> Tensor:
        self.left[site.index], self.entered[site.index] = skip, skip.detach().requires_grad_()
        return self.entered[site.index]
