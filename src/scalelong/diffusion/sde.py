"""The reverse SDE by Euler–Maruyama, and the probability-flow ODE by Euler's or Heun's method.

Both run in τ = −log ᾱ = ∫β, from the noisiest time down to the data at τ = 0, where s is the score of x_t:

    dx = −(x/2 + s)·dτ + dw    (the reverse SDE)
    dx = −(x + s)/2·dτ         (the probability flow, with the same distributions and no noise)

The score s = −(x − sqrt(ᾱ)·x_0)/(1−ᾱ) is that of the estimate of x_0. The last step ends at the estimate: it is where
the mean of the reverse SDE leads from a small τ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .process import DiffusionProcess


class EulerSolver:
    """What the methods share: the times, one step after another."""

    def __init__(self, process: DiffusionProcess, indices: list[int]) -> None:
        self.indices = indices
        # Paper: a step of β(t)·Δt; here: the integral of β over the step, because it is the same to first order and
        # is known for schedules in discrete time, too.
        log_signal = torch.log1p(-process.schedule.betas).cumsum(0)[indices]
        self.tau = [-value for value in log_signal.tolist()] + [0.0]
        self.done = 0

    def begin(self, noise: Tensor) -> Tensor:
        return noise

    def network_input(self, state: Tensor) -> Tensor:
        return state

    def advance(self) -> tuple[float, float]:
        """τ of the step that begins here, and its length."""
        tau, following = self.tau[self.done : self.done + 2]
        self.done += 1
        return tau, tau - following

    @property
    def is_last(self) -> bool:
        return self.done == len(self.tau) - 2


class EulerMaruyama(EulerSolver):
    """x ← x + (x/2 + s)·Δτ + sqrt(Δτ)·z: the paper's sampler, with 1000 steps in continuous time."""

    def step(self, x0: Tensor, state: Tensor, generators: list[torch.Generator]) -> Tensor:
        if self.is_last:
            return x0
        tau, length = self.advance()
        mean = state + (state / 2 + score(x0, state, tau)) * length
        return mean + math.sqrt(length) * draw_noise(state.shape[1:], generators).to(state.device)


class EulerFlow(EulerSolver):
    """x ← x + (x + s)/2·Δτ."""

    def step(self, x0: Tensor, state: Tensor, generators: list[torch.Generator]) -> Tensor:
        if self.is_last:
            return x0
        tau, length = self.advance()
        return state + (state + score(x0, state, tau)) * (length / 2)


class HeunFlow(EulerSolver):
    """Euler's step, and then again with the mean of the slopes at its two ends: two evaluations of the network."""

    def __init__(self, process: DiffusionProcess, indices: list[int]) -> None:
        super().__init__(process, indices)
        self.indices = [indices[0], *(index for index in indices[1:] for _ in range(2))]
        self.before: tuple[Tensor, Tensor, float] | None = None

    def step(self, x0: Tensor, state: Tensor, generators: list[torch.Generator]) -> Tensor:
        if self.before is not None:
            start, slope, length = self.before
            self.before = None
            return start + (slope + self._slope(x0, state)) * (length / 2)
        if self.is_last:
            return x0
        slope = self._slope(x0, state)
        _, length = self.advance()
        self.before = state, slope, length
        return state + slope * length

    def _slope(self, x0: Tensor, state: Tensor) -> Tensor:
        return (state + score(x0, state, self.tau[self.done])) / 2


def score(x0: Tensor, noisy: Tensor, tau: float) -> Tensor:
    """s = −(x − sqrt(ᾱ)·x_0)/(1−ᾱ), ᾱ = exp(−τ). Shape: (B, …), (B, …) → (B, …)."""
    return (math.exp(-tau / 2) * x0 - noisy) / -math.expm1(-tau)


def draw_noise(shape: tuple[int, ...] | torch.Size, generators: list[torch.Generator]) -> Tensor:
    """Standard normal noise, image k from the k-th generator. Shape: (B, *shape), on the CPU."""
    return torch.stack([torch.randn(*shape, generator=generator) for generator in generators])
