"""Images from noise, with any sampler, on a process and any predictor, and noise of its own for every image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .guidance import Predictor
from .process import DiffusionProcess
from .singlestep import image_singlestep, noise_singlestep
from .solvers import (
    EulerFlow,
    EulerMaruyama,
    HeunFlow,
    Solver,
    Variance,
    ancestral,
    heun,
    multistep,
    sample_noise,
)
from .spacing import SPACINGS, Spacing, solver_indices

__all__ = [
    "SAMPLERS",
    "SPACINGS",
    "Predictor",
    "Progress",
    "Spacing",
    "Variance",
    "sample",
    "solver_indices",
    "to_uint8",
]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Route:
    """How many steps a sampler takes and where; the variance of what `ddpm` draws."""

    steps: int
    spacing: Spacing
    variance: Variance

    def indices(self, process: DiffusionProcess, *, open_end: bool = False) -> list[int]:
        return solver_indices(process, self.steps, self.spacing, open_end=open_end)


Builder = Callable[[DiffusionProcess, Route], Solver]


def along(build: Callable[[DiffusionProcess, list[int]], Solver], *, as_dpm: bool = False) -> Builder:
    """A sampler that goes along some of the schedule's times, and from the cleanest of them to ᾱ = 1.

    diffusers' multistep schedulers leave the cleanest time out where its others, with the same spacing, visit it.
    """
    opened = ("linspace", "leading") if as_dpm else ()
    return lambda process, route: build(process, route.indices(process, open_end=route.spacing in opened))


# DDIM is the first-order update of DPM-Solver++; diffusers' own DDIMScheduler steps back by num_steps // steps, which
# misses its next time wherever that division has a remainder. Its DPMSolverSDEScheduler is not used, because its noise
# comes from a Brownian tree with a seed of its own and not from the images' generators.
SAMPLERS: Mapping[str, Builder] = {
    "ddim": along(partial(multistep, scheduler="DPMSolverMultistepScheduler", solver_order=1)),
    "ddpm": lambda process, route: ancestral(process, route.indices(process), variance=route.variance),
    "dpm-solver++": along(partial(multistep, scheduler="DPMSolverMultistepScheduler"), as_dpm=True),
    "dpm-solver++-sde": along(
        partial(multistep, scheduler="DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++"), as_dpm=True
    ),
    "heun": along(heun),
    "unipc": along(partial(multistep, scheduler="UniPCMultistepScheduler"), as_dpm=True),
    "dpm-solver-3": lambda process, route: noise_singlestep(process, route.steps, route.spacing),
    "dpm-solver++-3": lambda process, route: image_singlestep(process, route.steps, route.spacing),
    "euler-maruyama": along(EulerMaruyama),
    "ode": along(EulerFlow),
    "ode-heun": along(HeunFlow),
}


def build_solver(process: DiffusionProcess, sampler: str, route: Route) -> Solver:
    if sampler not in SAMPLERS:
        raise ValueError(f"no sampler {sampler!r}; known: {', '.join(SAMPLERS)}")
    if route.spacing not in SPACINGS:
        raise ValueError(f"no spacing {route.spacing!r}; known: {', '.join(SPACINGS)}")
    return SAMPLERS[sampler](process, route)


@torch.no_grad()
def sample(
    predict: Predictor,
    process: DiffusionProcess,
    start: Sequence[int] | Tensor,
    *,
    seeds: Sequence[int],
    steps: int = 50,
    sampler: str = "ddim",
    timestep_spacing: Spacing = "quadratic",
    variance: Variance = "small",
    clip: bool = True,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Tensor:
    """Images from noise, one for each seed. Shape: start (C, H, W), or noise (B, C, H, W) → (B, C, H, W), float32.

    `predict(x, t)` gets x of shape (B, C, H, W) and `process.model_time`s of shape (B,). Each image has
    noise of its own, whatever the batch: its first noise and that of every step come from one CPU generator.
    `clip` keeps every estimate of x_0 and the result within [-1, 1]; pass False for latents. What a sampler
    does with ε it does with the ε that belongs to the clipped estimate. `progress(done, all)` counts evaluations of the
    network, two for each step but the last with Heun's method.

    Of the schedule's `times` the sampler visits those of `timestep_spacing`, see `solver_indices`, and goes from the
    cleanest to ᾱ = 1; in continuous time from t = 1 to t = 0.001 and then to 0. The `variance` is that of `ddpm`, see
    `ancestral`.

    >>> process = DiffusionProcess()
    >>> sample(lambda x, t: torch.zeros_like(x), process, (1, 8, 8), seeds=[3, 4], steps=2).shape
    torch.Size([2, 1, 8, 8])
    """
    solver = build_solver(process, sampler, Route(steps, timestep_spacing, variance))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = solver.begin(_start(start, generators, device))
    precision = torch.float32 if process.schedule.is_continuous else torch.int64
    times = solver.times.to(x.device, precision)
    for done, time in enumerate(times):
        t, noisy = time.expand(len(x)), solver.network_input(x)
        x0 = process.predict_x0(predict(noisy, process.model_time(t)), noisy, t)
        x = solver.step(x0.clamp(-1, 1) if clip else x0, x, generators)
        if progress is not None:
            progress(done + 1, len(times))
    return x.clamp(-1, 1) if clip else x


def to_uint8(images: Tensor) -> Tensor:
    """Images in [-1, 1] as whole grey levels 0 … 255, rounded and clamped; NaN is black. Shape: any, kept.

    >>> to_uint8(torch.tensor([-1.0, 0.0, 1.0, 7.0, float("nan")])).tolist()
    [0, 128, 255, 255, 0]
    """
    # What NaN becomes when it is cast depends on the machine.
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).nan_to_num(nan=0.0).to(torch.uint8)


def _start(start: Sequence[int] | Tensor, generators: list[torch.Generator], device: torch.device | str) -> Tensor:
    """The noise to start from. It is sampled even if given, so that the noise of later steps is the same either way."""
    given = isinstance(start, Tensor)
    if not generators or (given and len(start) != len(generators)):
        wanted = f"{len(start)} seeds for as many noises" if given else "at least one seed"
        raise ValueError(f"every image has a seed of its own: expected {wanted}, got {len(generators)}")
    shape = start.shape[1:] if given else start
    noise = sample_noise(tuple(shape), generators)
    return start.float() if given else noise.to(device)
