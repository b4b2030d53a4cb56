"""Images from noise, with any solver, on a process and any predictor, and a seed of its own for every image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .process import DiffusionProcess
from .solvers import SAMPLERS, build_solver, sample_noise, solver_indices

__all__ = ["SAMPLERS", "Predictor", "Progress", "noise_predictor", "sample", "solver_indices", "to_uint8"]

Predictor = Callable[[Tensor, Tensor], Tensor]
Progress = Callable[[int, int], None]


@torch.no_grad()
def sample(
    predict: Predictor,
    process: DiffusionProcess,
    start: Sequence[int] | Tensor,
    *,
    seeds: Sequence[int],
    steps: int = 50,
    sampler: str = "ddim",
    clip: bool = True,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Tensor:
    """Images from noise, one for each seed. Shape: start (C, H, W), or noise (B, C, H, W) → (B, C, H, W), float32.

    `predict(x, t)` gets x of shape (B, C, H, W) and `process.model_time`s of shape (B,). Each image has
    noise of its own, whatever the batch: its first noise and that of every step come from one CPU generator.
    `clip` keeps every estimate of x_0 and the result within [-1, 1]; pass False for latents.
    `progress(done, all)` counts evaluations of the network, two for each step but the last with Heun's method.

    The solver goes through some of the schedule's `times`, see `solver_indices`, and from the cleanest to ᾱ = 1; in
    continuous time from t = 1 to t = 0.001 and then to 0.

    >>> process = DiffusionProcess()
    >>> sample(lambda x, t: torch.zeros_like(x), process, (1, 8, 8), seeds=[3, 4], steps=2).shape
    torch.Size([2, 1, 8, 8])
    """
    solver = build_solver(process, sampler, steps)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = solver.begin(_start(start, generators, device))
    precision = torch.float32 if process.schedule.is_continuous else torch.int64
    times = process.schedule.times[solver.indices].to(x.device, precision)
    for done, time in enumerate(times):
        t, noisy = time.expand(len(x)), solver.network_input(x)
        x0 = process.predict_x0(predict(noisy, process.model_time(t)), noisy, t)
        x = solver.step(x0.clamp(-1, 1) if clip else x0, x, generators)
        if progress is not None:
            progress(done + 1, len(times))
    return x.clamp(-1, 1) if clip else x


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
