"""DPM-Solver of third order in single steps (Lu et al. 2022), for the noise and for the image.

A step of order k evaluates the network k times: at its start and at k − 1 nodes within it. In λ = log sqrt(ᾱ/(1−ᾱ)),
with m the estimate of ε or of x_0 and h the length in λ from the start s to a point t,

    ε:    x_t = (α_t/α_s)·x_s − σ_t·((e^h − 1)·m_s + w·D)
    x_0:  x_t = (σ_t/σ_s)·x_s − α_t·((e^−h − 1)·m_s + w·D)

where D = (m_j − m_s)·h/h_j is the change from the start to the last node j, stretched to the point, and with k = h or
−h the weight w is (e^k − 1)/k − 1 in a step of order 3, (e^k − 1)/2 in one of order 2. n evaluations are as many steps
of order 3 as there is room for, and one or two of lower order at the end ("DPM-Solver-fast"). The result is the state
at the cleanest time: the network is not asked there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .process import DiffusionProcess
from .solvers import Generators, Solver
from .spacing import Spacing, check_steps, half_log_snr, nearest_indices, noisiest_index, solver_indices

# In continuous time, as U-ViT's eps for more than 15 evaluations.
CLEANEST_TIME = 1e-4
BISECTIONS = 60
"""Halvings of the range of times: more than float64 can tell apart."""


def step_orders(evaluations: int) -> list[int]:
    """The order of each step.

    >>> step_orders(6), step_orders(7), step_orders(8)
    ([3, 2, 1], [3, 3, 1], [3, 3, 2])
    """
    thirds, rest = divmod(evaluations, 3)
    return [3] * thirds + [rest] if rest else [3] * (thirds - 1) + [2, 1]


class Singlestep(Solver):
    """Steps of the given orders along nodes; `log_signal`, log ᾱ, has one more: the time at which it ends."""

    def __init__(self, times: Tensor, log_signal: Tensor, orders: list[int], *, of_image: bool) -> None:
        super().__init__(times)
        self.alpha = (log_signal / 2).exp().tolist()
        self.sigma = torch.expm1(log_signal).neg().sqrt().tolist()
        self.half_log_snr = half_log_snr(log_signal).tolist()
        self.orders = [order for order in orders for _ in range(order)]
        self.of_image = of_image
        self.start = 0
        self.state: Tensor | None = None
        self.first: Tensor | None = None

    def step(self, x0: Tensor, state: Tensor, generators: Generators) -> Tensor:
        here, alpha, sigma = self.done, self.alpha, self.sigma
        estimate = x0 if self.of_image else (state - alpha[here] * x0) / sigma[here]
        if self.state is None or self.first is None:
            self.start, self.state, self.first = here, state, estimate
        self.done += 1
        after = self.advance(self.state, self.first, estimate, here)
        if self.done - self.start == self.orders[here]:
            self.state = self.first = None
        return after

    def advance(self, state: Tensor, first: Tensor, estimate: Tensor, node: int) -> Tensor:
        """x at the point after the node, from the step's start and the estimates at its start and at the node."""
        start, point = self.start, node + 1
        carried, scale = (self.sigma, self.alpha) if self.of_image else (self.alpha, self.sigma)
        length = self.half_log_snr[point] - self.half_log_snr[start]
        signed = -length if self.of_image else length
        move = math.expm1(signed) * first
        if node > start:
            weight = math.expm1(signed) / signed - 1 if self.orders[node] == 3 else math.expm1(signed) / 2
            stretch = length / (self.half_log_snr[node] - self.half_log_snr[start])
            move = move + weight * stretch * (estimate - first)
        return carried[point] / carried[start] * state - scale[point] * move


def noise_singlestep(process: DiffusionProcess, steps: int, spacing: Spacing) -> Solver:
    """DPM-Solver-3: steps with the given spacing, whose nodes divide them evenly in λ."""
    check_steps(process, steps, open_end=True)
    orders = step_orders(steps)
    ends = step_ends(process, len(orders), spacing)
    within = [torch.arange(order) / order for order in orders]
    parts = [a + (b - a) * share for a, b, share in zip(ends[:-1], ends[1:], within, strict=True)]
    nodes = torch.cat([*parts, ends[-1:]])
    if not process.schedule.is_continuous:
        return on_table(process, nearest_indices(process, nodes.flip(0))[::-1], orders, of_image=False)
    times = times_at(process, nodes)
    return Singlestep(times[:-1], process.schedule.closed_form(times), orders, of_image=False)


def image_singlestep(process: DiffusionProcess, steps: int, spacing: Spacing) -> Solver:
    """DPM-Solver++ of order 3 in single steps: all nodes have the given spacing."""
    nodes = [*solver_indices(process, steps, spacing, open_end=True), 0]
    return on_table(process, nodes, step_orders(steps), of_image=True)


def on_table(process: DiffusionProcess, indices: list[int], orders: list[int], *, of_image: bool) -> Solver:
    """A solver whose nodes are some of the schedule's `times`."""
    times, log_signal = process.schedule.times[indices], process.schedule.log_alphas_cumprod[indices]
    return Singlestep(times[:-1], log_signal, orders, of_image=of_image)


def step_ends(process: DiffusionProcess, steps: int, spacing: Spacing) -> Tensor:
    """λ where steps begin, and where the last one ends. Shape: (steps + 1,), float64."""
    schedule = process.schedule
    known = half_log_snr(schedule.log_alphas_cumprod)
    if spacing != "logsnr":
        return known[[*solver_indices(process, steps, spacing, open_end=True), 0]]
    cleanest = known[:1]
    if schedule.is_continuous:
        cleanest = half_log_snr(schedule.closed_form(torch.tensor([CLEANEST_TIME], dtype=torch.float64)))
    noisiest = known[noisiest_index(process, steps + 1)]
    return torch.linspace(noisiest.item(), cleanest.item(), steps + 1, dtype=torch.float64)


def times_at(process: DiffusionProcess, targets: Tensor) -> Tensor:
    """The continuous times with these λ, by bisection: λ falls with the time. Shape: (N,) → (N,), float64."""
    low, high = torch.zeros_like(targets), torch.ones_like(targets)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_before = half_log_snr(process.schedule.closed_form(middle)) > targets
        low, high = torch.where(is_before, middle, low), torch.where(is_before, high, middle)
    return high
