"""Samplers: diffusers' solvers, run on a process and any predictor, with a seed of its own for every image."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .process import DiffusionProcess

Predictor = Callable[[Tensor, Tensor], Tensor]
Progress = Callable[[int, int], None]

# Name → scheduler class of diffusers and its options. DDIM is the first-order update of DPM-Solver++; diffusers' own
# DDIMScheduler steps back by num_steps // steps, which misses its next time wherever that division has a remainder.
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DPMSolverMultistepScheduler", {"solver_order": 1}),
    "ddpm": ("DDPMScheduler", {"clip_sample": False}),
    "dpm-solver++": ("DPMSolverMultistepScheduler", {"solver_order": 2}),
}

# log ᾱ/(1−ᾱ) of the noisiest start, just beyond the end of the linear schedule. The cosine schedule goes on to −20,
# where an error of the network in ε becomes one in x_0 that is 20,000 times as large.
NOISIEST_LOG_SNR = -10.2


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

    `predict(x, t)` gets x of shape (B, C, H, W) and `process.model_time`s of shape (B,). An image depends on its seed
    alone, whatever the batch: its first noise and that of every step come from one CPU generator.
    `clip` keeps every estimate of x_0 and the result within [-1, 1]; pass False for latents.
    `progress(done, steps)` is called after every step.

    The solver goes through some of the schedule's `times`, see `solver_indices`, and from the cleanest to ᾱ = 1. In
    continuous time its index k stands for t = (k+1)/num_steps, with the closed form's ᾱ there, and the network is fed
    t·999: it goes from t = 1 to t = 0.001 and then to 0.

    >>> process = DiffusionProcess()
    >>> sample(lambda x, t: torch.zeros_like(x), process, (1, 8, 8), seeds=[3, 4], steps=2).shape
    torch.Size([2, 1, 8, 8])
    """
    scheduler = _build_scheduler(process, sampler, steps)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = _start(start, generators, device)
    times = process.schedule.times[scheduler.timesteps].to(x.device, _time_dtype(process))
    for done, index in enumerate(scheduler.timesteps):
        t = times[done].expand(len(x))
        x0 = process.predict_x0(predict(x, process.model_time(t)), x, t)
        x0 = x0.clamp(-1, 1) if clip else x0
        x = scheduler.step(x0, index, x, generator=generators, return_dict=False)[0]
        if progress is not None:
            progress(done + 1, steps)
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
    """Images in [-1, 1] as whole grey levels 0 … 255, rounded and clamped. Shape: any, kept.

    >>> to_uint8(torch.tensor([-1.0, 0.0, 1.0, 7.0])).tolist()
    [0, 128, 255, 255]
    """
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def solver_indices(process: DiffusionProcess, steps: int) -> list[int]:
    """Where in the schedule's `times` the solver evaluates the network: quadratically spaced, noisiest first.

    Index i of n is (i/(n−1))² of the way, as DDIM has it for CIFAR-10, but at least i, so that all are different.
    On Gaussian data of standard deviation 0.2 even spacing loses 12 % of it in 50 steps of DDIM, this one 4 %.

    >>> solver_indices(DiffusionProcess(), 4)
    [999, 444, 111, 0]
    """
    available = process.schedule.num_steps
    if not 1 <= steps <= available:
        raise ValueError(f"steps must be between 1 and {available}, the schedule's number of times, got {steps}")
    log_snr = torch.logit(process.schedule.alphas_cumprod.double())
    last = max(int((log_snr >= NOISIEST_LOG_SNR).sum()), steps) - 1
    if steps == 1:
        return [last]
    return [max(i, round(last * (i / (steps - 1)) ** 2)) for i in reversed(range(steps))]


def _build_scheduler(process: DiffusionProcess, sampler: str, steps: int) -> Any:
    """The scheduler with the process's betas, set to its steps. It is given x_0, which the process works out."""
    if sampler not in SAMPLERS:
        raise ValueError(f"no sampler {sampler!r}; known: {', '.join(SAMPLERS)}")
    indices = solver_indices(process, steps)
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("sampling uses the solvers of diffusers: pip install 'scalelong[train]'") from error
    name, options = SAMPLERS[sampler]
    betas = process.schedule.betas.tolist()
    scheduler = getattr(diffusers, name)(
        num_train_timesteps=len(betas), trained_betas=betas, prediction_type="sample", **options
    )
    with warnings.catch_warnings():
        # diffusers hands a tensor to numpy in a way that numpy 2 deprecates.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        scheduler.set_timesteps(timesteps=indices)
    return scheduler


def _start(start: Sequence[int] | Tensor, generators: list[torch.Generator], device: torch.device | str) -> Tensor:
    """The noise to start from. It is drawn even if given, so that the noise of later steps is the same either way."""
    given = isinstance(start, Tensor)
    if not generators or (given and len(start) != len(generators)):
        wanted = f"{len(start)} seeds for as many noises" if given else "at least one seed"
        raise ValueError(f"every image has a seed of its own: expected {wanted}, got {len(generators)}")
    shape = start.shape[1:] if given else start
    drawn = torch.stack([torch.randn(*shape, generator=generator) for generator in generators])
    return start.float() if given else drawn.to(device)


def _time_dtype(process: DiffusionProcess) -> torch.dtype:
    return torch.float32 if process.schedule.is_continuous else torch.int64
