"""The forward process: noise schedules, times, noised images, what the network learns from them, and the loss."""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Time = Literal["discrete", "continuous"]


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """ᾱ as a function of time, where x_t = sqrt(ᾱ)·x_0 + sqrt(1−ᾱ)·ε (Eq. 1).

    Discrete times are the integers 0 … num_steps−1, with ᾱ_t = Π_{s≤t} (1−β_s). Continuous times lie in (0, 1], with
    ᾱ(t) = exp(−∫_0^t β) in closed form and a rate β(t) of num_steps times the β of one step.
    """

    time: Time = "discrete"
    num_steps: int = 1000
    """Discrete: the number of times. Continuous: the number of points of `times`, on which samplers choose theirs."""

    def __post_init__(self) -> None:
        if self.time not in get_args(Time):
            raise ValueError(f"time must be one of {', '.join(get_args(Time))}, got {self.time!r}")
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")

    @abstractmethod
    def step_betas(self) -> Tensor:
        """β of every discrete step. Shape: (num_steps,), float64."""

    @abstractmethod
    def closed_form(self, t: Tensor) -> Tensor:
        """log ᾱ at continuous times in [0, 1], in the precision of t. Shape: (B,) → (B,)."""

    @property
    def is_continuous(self) -> bool:
        return self.time == "continuous"

    @property
    def times(self) -> Tensor:
        """The schedule's grid: k, or (k+1)/num_steps in continuous time, for k < num_steps. Shape: (num_steps,)."""
        grid = torch.arange(self.num_steps)
        return (grid + 1).double() / self.num_steps if self.is_continuous else grid

    @property
    def betas(self) -> Tensor:
        """β between neighbours of `times`, the first of them from ᾱ = 1. Shape: (num_steps,), float64."""
        if not self.is_continuous:
            return self.step_betas()
        log_alphas = self.closed_form(self.times)
        return -torch.expm1(log_alphas.diff(prepend=log_alphas.new_zeros(1)))

    @property
    def log_alphas_cumprod(self) -> Tensor:
        """log ᾱ at every one of `times`. Shape: (num_steps,), float64."""
        return torch.log1p(-self.betas).cumsum(0)

    @property
    def alphas_cumprod(self) -> Tensor:
        """ᾱ at every one of `times`, computed in float64. Shape: (num_steps,), float32.

        >>> LinearSchedule().alphas_cumprod[[0, 499]].tolist()
        [0.99989..., 0.0785...]
        """
        return self.log_alphas_cumprod.exp().float()

    def log_alpha_bar(self, t: Tensor) -> Tensor:
        """log ᾱ at any times; the logarithm keeps both ᾱ and 1−ᾱ precise. Shape: (B,) → (B,), in float32 at least.

        >>> LinearSchedule(time="continuous").log_alpha_bar(torch.tensor([1.0])).tolist()
        [-10.05...]
        """
        if t.is_floating_point() != self.is_continuous:
            wanted = "floats in (0, 1]" if self.is_continuous else f"integers below {self.num_steps}"
            raise ValueError(f"a schedule in {self.time} time takes {wanted}, got times of dtype {t.dtype}")
        if self.is_continuous:
            return self.closed_form(t.to(torch.promote_types(t.dtype, torch.float32)))
        return _log_table(self, t.device)[t]


@lru_cache(maxsize=32)
def _log_table(schedule: Schedule, device: torch.device) -> Tensor:
    """log ᾱ of every step, kept on the device: a look-up then neither copies nor waits. Shape: (num_steps,)."""
    return schedule.log_alphas_cumprod.float().to(device)


@dataclass(frozen=True, kw_only=True)
class LinearSchedule(Schedule):
    """β rises linearly (DDPM; VP-SDE with β(t) from 0.1 to 20): log ᾱ(t) = −(β_0·t + (β_1−β_0)·t²/2)."""

    beta_start: float = 1e-4
    beta_end: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta_start <= self.beta_end < 1:
            raise ValueError(f"betas need 0 < beta_start ≤ beta_end < 1, got {self.beta_start} and {self.beta_end}")

    def step_betas(self) -> Tensor:
        return torch.linspace(self.beta_start, self.beta_end, self.num_steps, dtype=torch.float64)

    def closed_form(self, t: Tensor) -> Tensor:
        first, last = self.num_steps * self.beta_start, self.num_steps * self.beta_end
        return -t * (first + (last - first) / 2 * t)


@dataclass(frozen=True, kw_only=True)
class SqrtLinearSchedule(LinearSchedule):
    """sqrt(β) rises linearly, as in latent diffusion ("scaled_linear"): log ᾱ(t) = −∫_0^t (r_0 + (r_1−r_0)·s)² ds."""

    beta_start: float = 0.00085
    beta_end: float = 0.012

    def step_betas(self) -> Tensor:
        return torch.linspace(self.beta_start**0.5, self.beta_end**0.5, self.num_steps, dtype=torch.float64) ** 2

    def closed_form(self, t: Tensor) -> Tensor:
        root = math.sqrt(self.num_steps * self.beta_start)
        slope = math.sqrt(self.num_steps * self.beta_end) - root
        return -t * (root**2 + slope * t * (root + slope / 3 * t))


@dataclass(frozen=True, kw_only=True)
class CosineSchedule(Schedule):
    """ᾱ(t) = f(t)/f(0), f(t) = cos²(π/2·(t+s)/(1+s)), s = 0.008, β at most 0.999 (Nichol & Dhariwal 2021, Eq. 17).

    In continuous time the cap, which binds at the last step, becomes a floor: ᾱ(t) ≥ ᾱ(1−1/num_steps)·(1−max_beta).
    """

    offset: float = 0.008
    max_beta: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offset < 0 or not 0 < self.max_beta < 1:
            raise ValueError(f"offset must be ≥ 0 and max_beta in (0, 1), got {self.offset} and {self.max_beta}")

    def step_betas(self) -> Tensor:
        edges = torch.linspace(0, 1, self.num_steps + 1, dtype=torch.float64)
        return (-torch.expm1(self._uncapped(edges).diff())).clamp(max=self.max_beta)

    def closed_form(self, t: Tensor) -> Tensor:
        before_last, start = ((time + self.offset) / (1 + self.offset) for time in (1 - 1 / self.num_steps, 0))
        root = math.cos(math.pi / 2 * before_last) / math.cos(math.pi / 2 * start)
        return self._uncapped(t).clamp(min=2 * math.log(root) + math.log1p(-self.max_beta))

    def _uncapped(self, t: Tensor) -> Tensor:
        # cos(a+d)/cos(a) = 1 − 2·sin²(d/2) − tan(a)·sin(d): exact for small d, where the quotient of cosines is not.
        start = math.pi / 2 * self.offset / (1 + self.offset)
        angle = t * (math.pi / 2 / (1 + self.offset))
        loss = 2 * torch.sin(angle / 2) ** 2 + math.tan(start) * torch.sin(angle)
        return 2 * torch.log1p(-loss.clamp(max=1))


SCHEDULES = {"linear": LinearSchedule, "cosine": CosineSchedule, "sqrt-linear": SqrtLinearSchedule}


def build_schedule(name: str, *, time: Time = "discrete", num_steps: int = 1000) -> Schedule:
    """The schedule of that name with its usual constants.

    >>> build_schedule("linear", time="continuous")
    LinearSchedule(time='continuous', num_steps=1000, beta_start=0.0001, beta_end=0.02)
    """
    if name not in SCHEDULES:
        closest = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0)[0]
        raise ValueError(f"no schedule {name!r}; did you mean {closest!r}? Known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name](time=time, num_steps=num_steps)


Prediction = Literal["epsilon", "x0", "v"]

# Paper: t ~ U[0, 1]; here: from 1e-5, as in score SDEs, because x_0 and ε cannot be told apart at t = 0.
EARLIEST_TIME = 1e-5


class Loss(NamedTuple):
    """The loss of every image, shape (B,), and their mean."""

    per_sample: Tensor
    mean: Tensor


@dataclass(frozen=True)
class DiffusionProcess:
    """Noises images and scores predictions, x_t = sqrt(ᾱ_t)·x_0 + sqrt(1−ᾱ_t)·ε (Eq. 1).

    The network predicts ε, x_0, or v = sqrt(ᾱ)·ε − sqrt(1−ᾱ)·x_0. Results are float32 also for half-precision images
    and predictions, because ᾱ near 0 or 1 does not survive rounding; no method waits for the device.

    >>> process = DiffusionProcess(LinearSchedule(), "v")
    >>> x0, noise, t = torch.zeros(2, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.tensor([0, 999])
    >>> noisy = process.add_noise(x0, noise, t)
    >>> process.loss(process.target(x0, noise, t), x0, noise, t).mean
    tensor(0.)
    """

    schedule: Schedule = field(default_factory=LinearSchedule)
    prediction: Prediction = "epsilon"
    min_snr_gamma: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.prediction not in get_args(Prediction):
            raise ValueError(f"prediction must be one of {', '.join(get_args(Prediction))}, got {self.prediction!r}")
        if self.min_snr_gamma is not None and not self.min_snr_gamma > 0:
            raise ValueError(f"min_snr_gamma must be positive (5 is usual), or None, got {self.min_snr_gamma}")

    def sample_times(self, count: int, generator: torch.Generator, *, device: torch.device | str = "cpu") -> Tensor:
        """Uniform times: integers in [0, num_steps), or floats in [1e-5, 1]. Shape: (count,).

        They are sampled where the generator lives, so a CPU generator gives the same times for every device.
        """
        if self.schedule.is_continuous:
            times = self._from_uniform(torch.rand(count, generator=generator, device=generator.device))
        else:
            times = torch.randint(self.schedule.num_steps, (count,), generator=generator, device=generator.device)
        return times.to(device, non_blocking=True)

    def stratified_times(self, count: int, generator: torch.Generator, *, device: torch.device | str = "cpu") -> Tensor:
        """Uniform times, one in each of `count` equal parts of the range, in random order. Shape: (count,).

        They make a validation loss comparable between evaluations; any slice of them still spans the range.
        """
        order = torch.randperm(count, generator=generator, device=generator.device)
        within = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
        return self._from_uniform((order + within) / count).to(device, non_blocking=True)

    def model_time(self, t: Tensor) -> Tensor:
        """What the network is fed: t itself, or t·(num_steps−1), i.e. t·999, in continuous time. Shape: (B,)."""
        return t.float() * (self.schedule.num_steps - 1) if self.schedule.is_continuous else t

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t = sqrt(ᾱ_t)·x_0 + sqrt(1−ᾱ_t)·ε. Shape: (B, …), (B, …), (B,) → (B, …)."""
        alpha, sigma = self._coefficients(t, x0)
        return alpha * x0 + sigma * noise

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the network should predict at x_t. Shape: (B, …), (B, …), (B,) → (B, …)."""
        if self.prediction == "epsilon":
            return _precise(noise)
        if self.prediction == "x0":
            return _precise(x0)
        alpha, sigma = self._coefficients(t, x0)
        return alpha * noise - sigma * x0

    def loss_weight(self, t: Tensor) -> Tensor:
        """The weight of the squared error at t: 1, or min-SNR-γ (Hang et al. 2023). Shape: (B,) → (B,).

        With SNR = ᾱ/(1−ᾱ), all three are the loss min(SNR, γ)·‖x_0 − x̂_0‖² in terms of what is predicted:
        x0: min(SNR, γ);  epsilon: min(SNR, γ)/SNR;  v: min(SNR, γ)/(SNR + 1).
        """
        log_signal = self.schedule.log_alpha_bar(t)
        signal, noise, gamma = log_signal.exp(), -torch.expm1(log_signal), self.min_snr_gamma
        if gamma is None:
            return torch.ones_like(signal)
        if self.prediction == "epsilon":
            return (gamma * noise / signal).clamp(max=1)
        if self.prediction == "x0":
            return (signal / noise).clamp(max=gamma)
        return torch.minimum(signal, gamma * noise)

    def loss(self, prediction: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> Loss:
        """Weighted mean squared error of the network's output. Shape: three times (B, …), (B,) → (B,) and ()."""
        target = self.target(x0, noise, t)
        if prediction.shape != target.shape:
            raise ValueError(f"the network returned {tuple(prediction.shape)} for images of {tuple(target.shape)}")
        error = (_precise(prediction) - target).square()
        per_sample = error.mean(dim=tuple(range(1, error.ndim))) * self.loss_weight(t)
        return Loss(per_sample, per_sample.mean())

    def loss_of_nothing(self, variance: float | None = None) -> float | None:
        """The expected loss of the best prediction that does not see x_t: no noise, and the mean image as x_0.

        `variance` is that of the data about its mean image, per number; for x0 and v there is no answer without it.

        >>> DiffusionProcess().loss_of_nothing(), DiffusionProcess(prediction="v").loss_of_nothing(0.25)
        (1.0, 0.45...)
        """
        if self.prediction != "epsilon" and variance is None:
            return None
        times, data = self.schedule.times, variance or 0.0
        times = times.float() if self.schedule.is_continuous else times
        signal = self.schedule.log_alpha_bar(times).exp()
        squares = {"epsilon": torch.ones_like(signal), "x0": torch.full_like(signal, data)}
        squares["v"] = signal + (1 - signal) * data
        return (self.loss_weight(times) * squares[self.prediction]).mean().item()

    def predict_x0(self, prediction: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
        """The clean image that the network's output at x_t implies. Shape: (B, …), (B, …), (B,) → (B, …)."""
        alpha, sigma = self._coefficients(t, noisy)
        if self.prediction == "epsilon":
            return (noisy - sigma * prediction) / alpha
        if self.prediction == "x0":
            return _precise(prediction)
        return alpha * noisy - sigma * prediction

    def _coefficients(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(ᾱ) and sqrt(1−ᾱ), each of shape (B, 1, …), to be multiplied with images of shape (B, …)."""
        log_signal = self.schedule.log_alpha_bar(t).reshape(-1, *[1] * (like.ndim - 1))
        return torch.exp(log_signal / 2), torch.sqrt(-torch.expm1(log_signal))

    def _from_uniform(self, uniform: Tensor) -> Tensor:
        """Times of numbers in [0, 1]; rounding may have brought the last of them to 1. Shape: (B,) → (B,)."""
        if self.schedule.is_continuous:
            return (EARLIEST_TIME + (1 - EARLIEST_TIME) * uniform).float()
        return (uniform * self.schedule.num_steps).long().clamp(max=self.schedule.num_steps - 1)


def _precise(images: Tensor) -> Tensor:
    """The same values in float32 at least."""
    return images.to(torch.promote_types(images.dtype, torch.float32))
