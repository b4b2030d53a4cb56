"""The solvers that lead from noise to images: those of diffusers, and our own in τ.

Those of diffusers are given x_0 and the schedule's own times. Ours run in τ = −log ᾱ = ∫β, from the noisiest time down
to the data at τ = 0, and end at the estimate of x_0. With the score s = −(x − sqrt(ᾱ)·x_0)/(1−ᾱ) of x_t they are

    dx = −(x/2 + s)·dτ + dw    (the reverse SDE, by Euler–Maruyama)
    dx = −(x + s)/2·dτ         (the probability flow, with the same distributions and no noise, by Euler or Heun)
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from .process import DiffusionProcess

Generators = list[torch.Generator]
Variance = Literal["small", "large"]


class Solver(ABC):
    """One way from noise to images, whose state is x_t of Eq. 1.

    It evaluates the network at `times`, in this order; `done` steps are finished. Shape: times (N,).
    """

    def __init__(self, times: Tensor) -> None:
        self.times = times
        self.done = 0

    def begin(self, noise: Tensor) -> Tensor:
        """The state that stands for standard normal noise. Shape: (B, …) → (B, …)."""
        return noise

    def network_input(self, state: Tensor) -> Tensor:
        """x_t of Eq. 1 at the next of the times. Shape: (B, …) → (B, …)."""
        return state

    @abstractmethod
    def step(self, x0: Tensor, state: Tensor, generators: Generators) -> Tensor:
        """The next state, given the estimate of x_0 at this one; image k has the k-th generator. Shapes: (B, …)."""


class SchedulerSolver(Solver):
    """A scheduler of diffusers that keeps x_t."""

    def __init__(self, scheduler: Any, times: Tensor, *, random: bool) -> None:
        super().__init__(times)
        self.scheduler, self.random = scheduler, random

    def step(self, x0: Tensor, state: Tensor, generators: Generators) -> Tensor:
        # With a list, diffusers samples from one generator after another. Those without noise take no such argument.
        given = {"generator": generators} if self.random else {}
        index = self.scheduler.timesteps[self.done]
        self.done += 1
        return self.scheduler.step(x0, index, state, return_dict=False, **given)[0]


class SigmaSolver(SchedulerSolver):
    """A scheduler of diffusers that keeps x_t/sqrt(ᾱ) = x_0 + σ·ε."""

    def begin(self, noise: Tensor) -> Tensor:
        return noise * self._scale()

    def network_input(self, state: Tensor) -> Tensor:
        return state / self._scale()

    def _scale(self) -> float:
        """1/sqrt(ᾱ) at the next of the times."""
        return (1 + self.scheduler.sigmas[self.done].item() ** 2) ** 0.5


class EulerSolver(Solver):
    """What our own solvers share: steps in τ."""

    def __init__(self, process: DiffusionProcess, indices: list[int]) -> None:
        super().__init__(process.schedule.times[indices])
        # Paper: a step of β(t)·Δt; here: the integral of β over the step, because it is the same to first order and
        # is known for schedules in discrete time, too.
        self.tau = [*(-process.schedule.log_alphas_cumprod[indices]).tolist(), 0.0]

    def step(self, x0: Tensor, state: Tensor, generators: Generators) -> Tensor:
        if self.done == len(self.tau) - 2:
            return x0
        tau, following = self.tau[self.done : self.done + 2]
        self.done += 1
        return self.advance(x0, state, tau, tau - following, generators)

    @abstractmethod
    def advance(self, x0: Tensor, state: Tensor, tau: float, length: float, generators: Generators) -> Tensor:
        """The state after a step of this length from τ, which is not the last."""


class EulerMaruyama(EulerSolver):
    """x ← x + (x/2 + s)·Δτ + sqrt(Δτ)·z: the paper's sampler, with 1000 steps in continuous time."""

    def advance(self, x0: Tensor, state: Tensor, tau: float, length: float, generators: Generators) -> Tensor:
        mean = state + (state / 2 + score(x0, state, tau)) * length
        return mean + math.sqrt(length) * sample_noise(state.shape[1:], generators).to(state.device)


class EulerFlow(EulerSolver):
    """x ← x + (x + s)/2·Δτ."""

    def advance(self, x0: Tensor, state: Tensor, tau: float, length: float, generators: Generators) -> Tensor:
        return state + (state + score(x0, state, tau)) * (length / 2)


class HeunFlow(EulerSolver):
    """Euler's step, and then again with the mean of the slopes at its two ends: two evaluations of the network."""

    def __init__(self, process: DiffusionProcess, indices: list[int]) -> None:
        super().__init__(process, indices)
        self.times = torch.cat([self.times[:1], self.times[1:].repeat_interleave(2)])
        self.before: tuple[Tensor, Tensor, float] | None = None

    def step(self, x0: Tensor, state: Tensor, generators: Generators) -> Tensor:
        if self.before is None:
            return super().step(x0, state, generators)
        start, slope, length = self.before
        self.before = None
        return start + (slope + (state + score(x0, state, self.tau[self.done])) / 2) * (length / 2)

    def advance(self, x0: Tensor, state: Tensor, tau: float, length: float, generators: Generators) -> Tensor:
        slope = (state + score(x0, state, tau)) / 2
        self.before = state, slope, length
        return state + slope * length


def score(x0: Tensor, noisy: Tensor, tau: float) -> Tensor:
    """s = −(x − sqrt(ᾱ)·x_0)/(1−ᾱ), ᾱ = exp(−τ). Shape: (B, …), (B, …) → (B, …)."""
    return (math.exp(-tau / 2) * x0 - noisy) / -math.expm1(-tau)


def sample_noise(shape: tuple[int, ...] | torch.Size, generators: Generators) -> Tensor:
    """Standard normal noise, image k from the k-th generator. Shape: (B, *shape), on the CPU."""
    return torch.stack([torch.randn(*shape, generator=generator) for generator in generators])


def ancestral(process: DiffusionProcess, indices: list[int], *, variance: Variance = "small") -> Solver:
    """DDPM: samples x_s given x_t and the estimate of x_0, with the variance of q(x_s | x_t, x_0) or of q(x_t | x_s).

    The first, "small", is right for data that is one point; the second, "large", for data that is standard normal.
    """
    scheduler = build_scheduler("DDPMScheduler", process, clip_sample=False, variance_type=f"fixed_{variance}")
    scheduler.set_timesteps(timesteps=indices)
    return SchedulerSolver(scheduler, process.schedule.times[indices], random=True)


def multistep(process: DiffusionProcess, indices: list[int], *, scheduler: str, **options: Any) -> Solver:
    """DPM-Solver++ and UniPC: exponential integrators in log σ that reuse earlier estimates."""
    built = build_scheduler(scheduler, process, **options)
    set_grid(built, torch.tensor(indices), sigmas_at(process, indices))
    is_random = options.get("algorithm_type") == "sde-dpmsolver++"
    return SchedulerSolver(built, process.schedule.times[indices], random=is_random)


def heun(process: DiffusionProcess, indices: list[int]) -> Solver:
    """Heun's method in σ: all but the last step, which ends at σ = 0, look at their end and come back."""
    scheduler = build_scheduler("HeunDiscreteScheduler", process)
    visited, sigmas = torch.tensor(indices), sigmas_at(process, indices)
    visited = torch.cat([visited[:1], visited[1:].repeat_interleave(2)])
    sigmas = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])
    set_grid(scheduler, visited, sigmas)
    return SigmaSolver(scheduler, process.schedule.times[visited], random=False)


def sigmas_at(process: DiffusionProcess, indices: list[int]) -> Tensor:
    """σ = sqrt((1−ᾱ)/ᾱ) at the indices, and the 0 where the last step ends. Shape: (len(indices) + 1,), float32."""
    log_signal = process.schedule.log_alphas_cumprod[indices]
    return torch.cat([torch.expm1(-log_signal).sqrt(), log_signal.new_zeros(1)]).float()


def build_scheduler(name: str, process: DiffusionProcess, **options: Any) -> Any:
    """A scheduler with the process's betas. It is given x_0, which the process works out."""
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("sampling uses the solvers of diffusers: pip install 'scalelong[train]'") from error
    betas = process.schedule.betas.tolist()
    given = {"num_train_timesteps": len(betas), "trained_betas": betas, "prediction_type": "sample"}
    with without_numpy_warnings():
        return getattr(diffusers, name)(**given, **options)


def set_grid(scheduler: Any, visited: Tensor, sigmas: Tensor) -> None:
    """Make the scheduler visit these times. Shape: visited (N,), sigmas (N + 1,).

    UniPC cannot be asked for times, and all of them take 1 − ᾱ of a float32, which is off by 3e-4 of itself at t = 0.
    """
    with without_numpy_warnings():
        scheduler.set_timesteps(len(visited))
    scheduler.timesteps, scheduler.sigmas, scheduler.num_inference_steps = visited, sigmas, len(visited)
    # Else the place is looked up by the time, which may stand there twice.
    scheduler.set_begin_index(0)


@contextmanager
def without_numpy_warnings() -> Iterator[None]:
    """diffusers hands a tensor to numpy in a way that numpy 2 deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        yield
